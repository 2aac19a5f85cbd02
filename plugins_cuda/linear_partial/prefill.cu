// LinearPartial in prefill: x · Wᵀ, with unrounded fp32 sums.
//
//   x           bf16 [rows, K]            in
//   weight      bf16 [N/16, K/32, 512]    in   packed (linear/packing.py), or the format WEIGHTS
//   partial     fp32 [rows, N]            out
//   workspace   see linear/prefill.cu
//
// Two launches, as in linear/prefill.cu. A lane stores its sums from registers: eight lanes hold
// adjacent rows of the weight, 32 bytes of a token.
#include "../_device/prefill_dense.cuh"
#include "../_device/prefill_rows.cuh"

CONFIG

extern "C" __global__ void __launch_bounds__(kRowsThreads)
    linear_partial_rows(const uint16_t* x, unsigned char* workspace_panels, int rows,
                        int panel_rows) {
  write_panel_rows<Config::kKBlocks, Norm::kNone>(x, nullptr, 0.0f, workspace_panels, rows,
                                                  panel_rows);
}

struct PartialGemm : DenseGemm<Config> {
  static constexpr int kStagingValues = 0;
  struct Nothing {};
  float* partial;

  __device__ __forceinline__ Nothing ahead_of(const GemmTile&) const {
    return {};
  }

  template <int columns>
  __device__ __forceinline__ void store(const GemmTile& tile, Nothing,
                                        const float (&sums)[columns / 2], uint16_t*) const {
    const int slab = tile.row_tile + static_cast<int>(threadIdx.x) / 32;
    if (slab >= Config::kRowTiles) return;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    constexpr int kOutputs = 16 * Config::kRowTiles;
    float* const first =
        partial + static_cast<int64_t>(tile.first + 2 * t) * kOutputs + 16 * slab + g;
#pragma unroll
    for (int j = 0; j < columns / 8; ++j) {
#pragma unroll
      for (int next = 0; next < 2; ++next) {
        if (8 * j + 2 * t + next >= tile.live) continue;
        float* const output = first + static_cast<int64_t>(8 * j + next) * kOutputs;
        output[0] = sums[4 * j + next];
        output[8] = sums[4 * j + 2 + next];
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(kGemmThreads, 1)
    linear_partial_gemm(const DenseWeights<Config>::Units::Stored* weight, float* partial,
                        const unsigned char* workspace_panels, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ TileRing<Config> ring;
  PartialGemm gemm;
  gemm.weight = weight;
  gemm.panel_start = workspace_panels;
  gemm.rows = rows;
  gemm.partial = partial;
  prefill_gemm(gemm, ring, shared);
}
