// RmsMoe over a prompt chunk, down: sorted rows of h · down of their experts.
//
// Tensors and numbers are those of prefill.cu.
#include "../_device/prefill_store.cuh"
#include "device/config.cuh"
#include "device/prefill_experts.cuh"

struct DownGemm : ExpertGemm<Experts::Down> {
  static constexpr int kStagingValues = kRowsStride;
  const uint16_t* bias;
  uint16_t* out;  // [sorted rows, H]

  __device__ __forceinline__ LaneBias ahead_of(const GemmTile& tile) const {
    return lane_bias<Config::kRowTiles>(
        bias + static_cast<size_t>(tile.expert) * (16 * Config::kRowTiles), tile);
  }

  template <int columns>
  __device__ __forceinline__ void store(const GemmTile& tile, LaneBias ahead,
                                        const float (&sums)[columns / 2], uint16_t* staging) const {
    stage_rows<columns>(sums, ahead.widened(), staging);
    const int first_row = 16 * tile.row_tile + kGroupRows * warpgroup();
    for_each_piece<8>(tile.live, [&](int token, int piece) {
      const int column = first_row + 8 * piece;
      if (column >= 16 * Config::kRowTiles) return;
      *reinterpret_cast<uint4*>(
          out + static_cast<size_t>(tile.first + token) * (16 * Config::kRowTiles) + column) =
          *reinterpret_cast<const uint4*>(staging + token * kRowsStride + 8 * piece);
    });
  }
};

extern "C" __global__ void __launch_bounds__(kGemmThreads, 1)
    moe_down(const unsigned char* down, const uint16_t* down_bias, int* workspace_tiles,
             uint16_t* workspace_rows, const unsigned char* workspace_h, int panel_rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ TileRing<Config> ring;
  DownGemm gemm;
  gemm.packed = down;
  gemm.panel_start = workspace_h;
  gemm.rows_of_panels = panel_rows;
  gemm.tiles = workspace_tiles;
  gemm.taken = kTakenDown;
  gemm.bias = down_bias;
  gemm.out = workspace_rows;
  prefill_gemm(gemm, ring, shared);
}
