// From a warpgroup's sums to rows of bf16 in shared memory, token by token.
//
// A lane holds sums of weight rows g and g + 8 of its warp's 16 and of tokens 2t, 2t + 1 of
// every 8. Rounded, they are 8×8 matrices that one transposition turns into tokens with their rows
// in order. The 64 rows of a warpgroup then leave as 128 contiguous bytes a token.
#pragma once

#include "prefill_gemm.cuh"

// 16-bit values between tokens: 16 bytes more than a token has, so that banks differ.
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

// The bias of rows g and g + 8 of the warp's 16 weight rows; rows beyond the last repeat it. What a
// Gemm asks for before a tile's sums, so that it is there behind them: as bits, because a warp
// would wait for the load to widen it.
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

// [token][64 weight rows of the warpgroup], sums plus the bias of rows g and g + 8, rounded.
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

// [token][32 results of the warpgroup]: ``act(gate, up)`` of rows g and g + 8, rounded.
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

// Calls ``store(token, piece)`` for every live token and each of its ``pieces``, pieces fastest.
template <int pieces, class Store>
__device__ __forceinline__ void for_each_piece(int live, const Store& store) {
  for (int unit = threadIdx.x % kGroupThreads; unit < live * pieces; unit += kGroupThreads)
    store(unit / pieces, unit % pieces);
}

// The same with ``fetch(token, piece)``, a load whose result goes to ``store(token, piece, got)``:
// several loads are under way at a time, where a store would hold up the next one's.
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
