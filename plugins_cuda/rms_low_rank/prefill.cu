// RmsLowRank in prefill: y = rms(x) · Wᵀ, then norms, RoPE and cache writes of its parts.
//
//   x                    bf16 [rows, K], in
//   norm                 bf16 [K], in, HAS_NORM
//   weight               bf16 [N/16, K/32, 512], in, packed (linear/packing.py), or WEIGHTS
//   q_norm … q           see entries.cu
//   workspace_projected  bf16 [rows, N], out, then in
//   workspace_panels     K rounded up to 64 · rows rounded up to COLUMNS, bf16: panels of rms(x)
//
// Three launches: rms(x) as panels, the GEMM, then the kernel of entries.cu.
#include "../_device/prefill_dense.cuh"
#include "../_device/prefill_rows.cuh"
#include "../_device/prefill_store.cuh"
#include "device/entries.cuh"

constexpr Norm kNorm = Config::kHasNorm ? static_cast<Norm>(Config::kNormRounding) : Norm::kNone;

extern "C" __global__ void __launch_bounds__(kRowsThreads)
    rms_low_rank_rows(const uint16_t* x, const uint16_t* norm, unsigned char* workspace_panels,
                      int rows, int panel_rows) {
  write_panel_rows<Config::kKBlocks, kNorm>(x, norm, static_cast<float>(Config::kEps),
                                            workspace_panels, rows, panel_rows);
}

struct LowRankGemm : DenseGemm<Config> {
  static constexpr int kStagingValues = kRowsStride;
  uint16_t* projected;

  struct Nothing {};
  __device__ __forceinline__ Nothing ahead_of(const GemmTile&) const {
    return {};
  }

  template <int columns>
  __device__ __forceinline__ void store(const GemmTile& tile, Nothing,
                                        const float (&sums)[columns / 2], uint16_t* staging) const {
    stage_rows<columns>(sums, make_float2(0.0f, 0.0f), staging);
    const int first_row = 16 * tile.row_tile + kGroupRows * warpgroup();
    for_each_piece<8>(tile.live, [&](int token, int piece) {
      const int row = first_row + 8 * piece;
      if (row >= 16 * Config::kRowTiles) return;
      *reinterpret_cast<uint4*>(
          projected + static_cast<size_t>(tile.first + token) * (16 * Config::kRowTiles) + row) =
          *reinterpret_cast<const uint4*>(staging + token * kRowsStride + 8 * piece);
    });
  }
};

extern "C" __global__ void __launch_bounds__(kGemmThreads, 1)
    rms_low_rank_gemm(const DenseWeights<Config>::Units::Stored* weight,
                      uint16_t* workspace_projected, const unsigned char* workspace_panels,
                      int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ TileRing<Config> ring;
  LowRankGemm gemm;
  gemm.weight = weight;
  gemm.panel_start = workspace_panels;
  gemm.rows = rows;
  gemm.projected = workspace_projected;
  prefill_gemm(gemm, ring, shared);
}

extern "C" __global__ void __launch_bounds__(kEntryThreads)
    rms_low_rank_prompt_entries(const uint16_t* q_norm, const uint16_t* latent_norm,
                                const float* cos, const float* sin, const int* positions,
                                const int* write_slot, uint16_t* c_pool, uint16_t* q,
                                const uint16_t* workspace_projected) {
  DYNAMIC_SHARED(unsigned char, shared);
  write_entries(
      {q_norm, latent_norm, cos, sin, positions, write_slot, c_pool, q, workspace_projected},
      shared);
}
