// RmsSwiglu in prefill: h = silu(n·Gᵀ)·(n·Uᵀ) with n = rms(x), or n = x without HAS_NORM.
//
//   x           bf16 [rows, K]               in
//   norm        bf16 [K]                     in
//   gate_up     bf16 [2·I/16, K/32, 512]     in   packed: 8 gate rows, then their 8 up rows;
//                                            or the format WEIGHTS
//   bias        bf16 [2·I]                   in   HAS_BIAS; in packed order
//   h           bf16 [rows, I]               out
//   workspace   K rounded up to 64 · rows rounded up to COLUMNS, bf16: panels of rms(x)
//
// Two launches: rms(x) as panels, then the GEMM; a lane has gate and up of one output. 2048 rows,
// 2880 → 2·17280 (the draft's MLP), take 408 GFLOP, 0.7 ms at 580 TFLOP/s.
#include "../_device/prefill_biased.cuh"
#include "../_device/prefill_rows.cuh"
#include "../_device/prefill_store.cuh"
#include "device/config.cuh"

constexpr Norm kNorm = Config::kHasNorm ? static_cast<Norm>(Config::kNormRounding) : Norm::kNone;

extern "C" __global__ void __launch_bounds__(kRowsThreads)
    rms_swiglu_rows(const uint16_t* x, const uint16_t* norm, unsigned char* workspace_panels,
                    int rows, int panel_rows) {
  write_panel_rows<Config::kKBlocks, kNorm>(x, norm, static_cast<float>(Config::kEps),
                                            workspace_panels, rows, panel_rows);
}

struct SwigluGemm : BiasedGemm<Config> {
  static constexpr int kStagingValues = kPairsStride;
  uint16_t* h;

  // Gate, up, activation and the product are each rounded.
  static __device__ __forceinline__ float activate(float gate, float up) {
    const float g = bf16_to_float(float_to_bf16(gate)), u = bf16_to_float(float_to_bf16(up));
    // GELU by tanh is x·σ(2√(2/π)·(x + 0.044715·x³)).
    const float z = Config::kActivation == 0 ? g : 1.59576912f * (g + 0.044715f * g * g * g);
    const float activated = __fdividef(g, 1.0f + exp2_fast(-1.44269504f * z));
    return bf16_to_float(float_to_bf16(activated)) * u;
  }

  template <int columns>
  __device__ __forceinline__ void store(const GemmTile& tile, LaneBias ahead,
                                        const float (&sums)[columns / 2], uint16_t* staging) const {
    const float2 b = ahead.widened();
    stage_pairs<columns>(
        sums,
        [&](float gate, float up) {
          return Config::kHasBias ? activate(gate + b.x, up + b.y) : activate(gate, up);
        },
        staging);
    const int first_column = 8 * tile.row_tile + kGroupRows / 2 * warpgroup();
    for_each_piece<4>(tile.live, [&](int token, int piece) {
      const int column = first_column + 8 * piece;
      if (column >= 8 * Config::kRowTiles) return;
      *reinterpret_cast<uint4*>(
          h + static_cast<size_t>(tile.first + token) * (8 * Config::kRowTiles) + column) =
          *reinterpret_cast<const uint4*>(staging + token * kPairsStride + 8 * piece);
    });
  }
};

extern "C" __global__ void __launch_bounds__(kGemmThreads, 1)
    rms_swiglu_gemm(const DenseWeights<Config>::Units::Stored* gate_up, const uint16_t* bias,
                    uint16_t* h, const unsigned char* workspace_panels, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ TileRing<Config> ring;
  SwigluGemm gemm;
  gemm.weight = gate_up;
  gemm.panel_start = workspace_panels;
  gemm.rows = rows;
  gemm.bias = bias;
  gemm.h = h;
  prefill_gemm(gemm, ring, shared);
}
