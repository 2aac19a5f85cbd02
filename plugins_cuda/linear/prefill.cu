// Linear in prefill: y = SCALE · (x·Wᵀ (+ bias)) (+ residual).
//
//   x           bf16 [rows, K]            in
//   weight      bf16 [N/16, K/32, 512]    in   packed (linear/packing.py), or the format WEIGHTS
//   bias        bf16 [N]                  in   HAS_BIAS
//   residual    bf16 [rows, N]            in   HAS_RESIDUAL
//   y           bf16 [rows, N]            out
//   workspace   K rounded up to 64 · rows rounded up to COLUMNS, bf16: panels of x
//
// Two launches: x as panels, then the GEMM. 2048 rows, 4096 → 2880, take 48.3 GFLOP. They move 17
// MB of x (read, and written as panels, in L2), 24 MB of weights, and 24 MB of y and residual. With
// 192 tokens per tile, 253 tiles are 1.92 waves of 132 CTAs: about 90 µs at 530 TFLOP/s, and 7 µs
// for the panels.
#include "../_device/prefill_biased.cuh"
#include "../_device/prefill_rows.cuh"
#include "device/addends.cuh"
#include "device/config.cuh"

extern "C" __global__ void __launch_bounds__(kRowsThreads)
    linear_rows(const uint16_t* x, unsigned char* workspace_panels, int rows, int panel_rows) {
  write_panel_rows<Config::kKBlocks, Norm::kNone>(x, nullptr, 0.0f, workspace_panels, rows,
                                                  panel_rows);
}

struct LinearGemm : BiasedGemm<Config> {
  const uint16_t* residual;
  uint16_t* y;

  template <int columns>
  __device__ __forceinline__ void store(const GemmTile& tile, LaneBias ahead,
                                        const float (&sums)[columns / 2], uint16_t* staging) const {
    stage_rows<columns>(sums, ahead.widened(), staging);
    const int first_row = 16 * tile.row_tile + kGroupRows * warpgroup();
    const auto place = [&](int token, int piece) {
      return static_cast<size_t>(tile.first + token) * (16 * Config::kRowTiles) + first_row +
             8 * piece;
    };
    const auto there = [&](int piece) { return first_row + 8 * piece < 16 * Config::kRowTiles; };
    for_each_fetched_piece<8>(
        tile.live,
        [&](int token, int piece) {
          const bool fetched = Config::kHasResidual && there(piece);
          return fetched ? *reinterpret_cast<const uint4*>(residual + place(token, piece))
                         : make_uint4(0, 0, 0, 0);
        },
        [&](int token, int piece, uint4 r) {
          if (!there(piece)) return;
          uint4 v = *reinterpret_cast<const uint4*>(staging + token * kRowsStride + 8 * piece);
          if (Config::kScale != 1) {
            v = make_uint4(scaled_pair(v.x), scaled_pair(v.y), scaled_pair(v.z), scaled_pair(v.w));
          }
          if (Config::kHasResidual) {
            v = make_uint4(added(v.x, r.x), added(v.y, r.y), added(v.z, r.z), added(v.w, r.w));
          }
          *reinterpret_cast<uint4*>(y + place(token, piece)) = v;
        });
  }

  static __device__ __forceinline__ uint32_t scaled_pair(uint32_t pair) {
    return static_cast<uint32_t>(scaled(static_cast<uint16_t>(pair >> 16))) << 16 |
           scaled(static_cast<uint16_t>(pair));
  }

  static __device__ __forceinline__ uint32_t added(uint32_t a, uint32_t b) {
    const float2 x = unpack_bf16x2(a), y = unpack_bf16x2(b);
    return pack_bf16x2(x.x + y.x, x.y + y.y);
  }
};

extern "C" __global__ void __launch_bounds__(kGemmThreads, 1)
    linear_gemm(const DenseWeights<Config>::Units::Stored* weight, const uint16_t* bias,
                const uint16_t* residual, uint16_t* y, const unsigned char* workspace_panels,
                int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ TileRing<Config> ring;
  LinearGemm gemm;
  gemm.weight = weight;
  gemm.panel_start = workspace_panels;
  gemm.rows = rows;
  gemm.bias = bias;
  gemm.residual = residual;
  gemm.y = y;
  prefill_gemm(gemm, ring, shared);
}
