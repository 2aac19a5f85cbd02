// The epilogue of the experts' prefill GEMM for down: sorted rows of bf16.
#pragma once

#include "../../_device/prefill_store.cuh"
#include "prefill_experts.cuh"

template <int warps>
struct DownGemm : ExpertGemm<Experts::Down, warps> {
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

template <int warps>
__device__ __forceinline__ DownGemm<warps> down_gemm(const unsigned char* down,
                                                     const uint16_t* bias, int* tiles,
                                                     uint16_t* rows, const unsigned char* h,
                                                     int panel_rows) {
  DownGemm<warps> gemm;
  gemm.packed = down;
  gemm.panel_start = h;
  gemm.rows_of_panels = panel_rows;
  gemm.tiles = tiles;
  gemm.taken = kTakenDown;
  gemm.bias = bias;
  gemm.out = rows;
  return gemm;
}
