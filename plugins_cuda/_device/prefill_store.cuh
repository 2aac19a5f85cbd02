// The epilogue of the prefill GEMM: from a warpgroup's sums to bf16 rows in shared memory.
//
// A lane holds sums of weight rows g and g + 8 of the warp's 16, for tokens 2t, 2t + 1 of every 8.
// Rounded to bf16 they are 8×8 matrices. A transposition turns them into tokens with adjacent rows.
// The 64 rows of a warpgroup are then stored as 128 contiguous bytes per token.
#pragma once

#include "prefill_gemm.cuh"

// The stride between tokens, in 16-bit values: 16 bytes of padding avoid bank conflicts.
constexpr int kRowsStride = kGroupRows + 8;
constexpr int kPairsStride = kGroupRows / 2 + 8;
constexpr int kGroupThreads = 128;

__device__ __forceinline__ int warpgroup() {
  return static_cast<int>(threadIdx.x) / kGroupThreads;
}

__device__ __forceinline__ void warpgroup_sync() {
  named_barrier_sync(1 + warpgroup(), kGroupThreads);
}

__device__ __forceinline__ void stage_word(uint16_t* staging, int stride, int token, int value,
                                           uint32_t pair) {
  *reinterpret_cast<uint32_t*>(staging + token * stride + value) = transpose_8x8(pair);
}

// The bias of rows g and g + 8 of the warp's 16 weight rows; rows beyond the last repeat it. A Gemm
// loads it before the sums of a tile. It remains in bf16, because a conversion would wait for the
// load.
struct LaneBias {
  uint16_t low, high;
  __device__ __forceinline__ float2 widened() const {
    return make_float2(bf16_to_float(low), bf16_to_float(high));
  }
};

template <int row_tiles>
__device__ __forceinline__ LaneBias lane_bias(const uint16_t* bias, const GemmTile& tile) {
  const int slab = min(tile.row_tile + static_cast<int>(threadIdx.x) / 32, row_tiles - 1);
  const uint16_t* const row = bias + 16 * slab + threadIdx.x % 32 / 4;
  return {row[0], row[8]};
}

// Store sums plus the bias of rows g and g + 8, rounded, as [token][64 rows of the warpgroup].
template <int columns>
__device__ __forceinline__ void stage_rows(const float (&sums)[columns / 2], float2 bias,
                                           uint16_t* staging) {
  const int warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  warpgroup_sync();
#pragma unroll
  for (int j = 0; j < columns / 8; ++j) {
    const float* const d = &sums[4 * j];
    stage_word(staging, kRowsStride, 8 * j + g, 16 * warp + 2 * t,
               pack_bf16x2(d[0] + bias.x, d[1] + bias.x));
    stage_word(staging, kRowsStride, 8 * j + g, 16 * warp + 8 + 2 * t,
               pack_bf16x2(d[2] + bias.y, d[3] + bias.y));
  }
  warpgroup_sync();
}

// Store ``act(gate, up)`` of rows g and g + 8, rounded, as [token][32 results of the warpgroup].
template <int columns, class Activation>
__device__ __forceinline__ void stage_pairs(const float (&sums)[columns / 2], const Activation& act,
                                            uint16_t* staging) {
  const int warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  warpgroup_sync();
#pragma unroll
  for (int j = 0; j < columns / 8; ++j) {
    const float* const d = &sums[4 * j];
    stage_word(staging, kPairsStride, 8 * j + g, 8 * warp + 2 * t,
               pack_bf16x2(act(d[0], d[2]), act(d[1], d[3])));
  }
  warpgroup_sync();
}

// Call ``store(token, piece)`` for every live token and each of its ``pieces``, pieces fastest.
template <int pieces, class Store>
__device__ __forceinline__ void for_each_piece(int live, const Store& store) {
  for (int unit = threadIdx.x % kGroupThreads; unit < live * pieces; unit += kGroupThreads)
    store(unit / pieces, unit % pieces);
}

// The same with a load ``fetch(token, piece)``, whose result is passed to ``store(token, piece,
// value)``. Several loads are issued before the first store, which would delay the next load.
template <int pieces, class Fetch, class Store>
__device__ __forceinline__ void for_each_fetched_piece(int live, const Fetch& fetch,
                                                       const Store& store) {
  constexpr int kAtOnce = 4;
  const int units = live * pieces;
  for (int first = threadIdx.x % kGroupThreads; first < units; first += kAtOnce * kGroupThreads) {
    decltype(fetch(0, 0)) got[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int unit = min(first + i * kGroupThreads, units - 1);
      got[i] = fetch(unit / pieces, unit % pieces);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int unit = first + i * kGroupThreads;
      if (unit < units) store(unit / pieces, unit % pieces, got[i]);
    }
  }
}
