// Dense operands of the prefill GEMM: packed bf16 weights, and tiles of one group of rows.
#pragma once

#include "prefill_gemm.cuh"

// One packed tile of 16 rows [K/32][half (2)][lane (32)][8]: a lane's part of half h is rows
// g + 8h of the A operand, words 0, 1 of it for the first wgmma of a block and 2, 3 for the second.
struct DenseWeights {
  static constexpr int kAhead = COLUMNS > 128 ? 2 : 4;
  struct Raw {
    uint4 half[2][2];  // [block of the panel][half of the tile]
  };
  const unsigned char* at;

  DenseWeights() = default;
  __device__ __forceinline__ DenseWeights(const uint16_t* packed, int row_tile)
      : at(reinterpret_cast<const unsigned char*>(packed) +
           static_cast<size_t>(min(row_tile, ROW_TILES - 1)) * K_BLOCKS * 1024 +
           threadIdx.x % 32 * 16) {}

  __device__ __forceinline__ void load_next(Raw& raw, int panel) {
    if (panel >= kPanels) return;
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const bool there = K_BLOCKS % 2 == 0 || 2 * panel + block < K_BLOCKS;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        raw.half[block][half] =
            there ? load_constant16(at + block * 1024 + half * 512) : make_uint4(0, 0, 0, 0);
    }
    at += 2 * 1024;
  }

  static __device__ __forceinline__ void decode(const Raw& raw, uint32_t (&a)[4][4]) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const uint4 low = raw.half[block][0], high = raw.half[block][1];
      const uint32_t values[8] = {low.x, high.x, low.y, high.y, low.z, high.z, low.w, high.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) a[2 * block + i / 4][i % 4] = values[i];
    }
  }
};

// What dense GEMMs share: all rows are one group, CTAs take tiles in turn, weight rows fastest.
struct DenseGemm {
  using Weights = DenseWeights;
  static constexpr bool kAnyColumns = false;
  static constexpr int kRowTiles = ceil_div(ROW_TILES, kConsumerWarps);
  const uint16_t* weight;
  const unsigned char* panel_start;
  int rows;

  __device__ __forceinline__ int token_tiles() const {
    return ceil_div(rows, COLUMNS);
  }
  __device__ __forceinline__ const unsigned char* panels() const {
    return panel_start;
  }
  __device__ __forceinline__ int panel_rows() const {
    return token_tiles() * COLUMNS;
  }
  __device__ __forceinline__ GemmTile first_tile() const {
    return tile(blockIdx.x);
  }
  __device__ __forceinline__ GemmTile next_tile(const GemmTile& one) const {
    return tile(one.first / COLUMNS * kRowTiles + one.row_tile / kConsumerWarps + gridDim.x);
  }
  __device__ __forceinline__ GemmTile tile(int id) const {
    if (id >= kRowTiles * token_tiles()) return no_tile();
    const int first = id / kRowTiles * COLUMNS;
    return {id % kRowTiles * kConsumerWarps, 0, first, COLUMNS, min(COLUMNS, rows - first)};
  }
  __device__ __forceinline__ Weights weights(const GemmTile&, int row_tile) const {
    return {weight, row_tile};
  }
};
