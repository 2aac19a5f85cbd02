// Keys and values in the pools and in tiles of shared memory, as operands of products, and the
// columns of sums.
//
// Config: WIDTH, CODES.
//
// With CODES they are e4m3 (kv_write/codes.py), a byte each, and ldmatrix moves pairs of them. They
// are converted to f16, which is exact and takes one instruction per pair; a conversion to bf16
// takes five. Queries and weights are therefore f16 too. Queries are exact except beyond ±65504 and
// below 2^−14; weights gain three bits. Four values of a lane are adjacent, so the columns of
// operands differ from those of bf16. Of the 16 columns of a step, lane t of four has
//
//                         bf16                   CODES
//   of a key, a query     2t, 2t + 1, 2t + 8, + 9  4t, 4t + 1, 4t + 2, 4t + 3
//   of the sums           2t, 2t + 1; 2t + 8, + 9  4t, 4t + 2; 4t + 1, 4t + 3
#pragma once

#include "../../_device/attention_tile.cuh"
#include "../../_device/f16.cuh"
#include "config.cuh"

constexpr int kCacheWords = Config::kCodes ? Config::kWidth / 2 : Config::kWidth;  // of 16 bits
constexpr int kUnits = kCacheWords / 8;  // of 16 bytes, in a head of the pools
// The strides of rows of a tile: of keys or values, and of queries.
constexpr int kRowUnits = tile_row_units<kCacheWords>();
constexpr int kQueryUnits = tile_row_units<Config::kWidth>();
static_assert(!Config::kCodes || Config::kWidth % 32 == 0, "steps of 16 bytes come in pairs");

// Products and their A operands.
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[2]) {
  if constexpr (Config::kCodes) {
    mma_f16(d, a, b);
  } else {
    mma_bf16(d, a, b);
  }
}

__device__ __forceinline__ uint32_t pack_weights(float low, float high) {
  return Config::kCodes ? pack_f16x2(low, high) : pack_bf16x2(low, high);
}

__device__ __forceinline__ uint32_t query_operand(uint32_t pair) {
  return Config::kCodes ? bf16x2_to_f16x2(pair) : pair;
}

// In half `half` of a step's operand, lane t has the 32-bit word query_lane(t) + query_step(step,
// half) of a query's head.
__device__ __forceinline__ constexpr int query_lane(int t) {
  return Config::kCodes ? 2 * t : t;
}
__device__ __forceinline__ constexpr int query_step(int step, int half) {
  return Config::kCodes ? 8 * step + half : 8 * step + 4 * half;
}

// Lane t's pair n of the sums is pair kPairLane · t + pair_step(n) of the head. It starts at column
// kColumnLane · t + column_step(n).
constexpr int kPairLane = Config::kCodes ? 2 : 1, kColumnLane = 2 * kPairLane;
__device__ __forceinline__ constexpr int column_step(int n) {
  return Config::kCodes ? n / 2 * 16 + n % 2 * 2 : 8 * n;
}
__device__ __forceinline__ constexpr int pair_step(int n) {
  return Config::kCodes ? n / 2 * 8 + n % 2 : 4 * n;
}

// Return pair n of half j of the sums.
template <int columns>
__device__ __forceinline__ float2 pair_of(const float (&sums)[columns][4], int n, int j) {
  if (!Config::kCodes) return make_float2(sums[n][2 * j], sums[n][2 * j + 1]);
  const int i = 2 * j + n % 2;
  return make_float2(sums[n & -2][i], sums[n | 1][i]);
}

// Load quantized values of 16 keys for two steps, from column 32·pair on: of keys 0 … 7 and of 8 …
// 15, by step. `row` is this lane's row of the tile.
__device__ __forceinline__ void load_key_codes(uint32_t (&first)[2], uint32_t (&second)[2],
                                               const uint4* tile, int row, int pair) {
  load_key_columns_at<kCacheWords>(first, second, tile, row, pair);
}

// The B operand of eight keys and a step.
__device__ __forceinline__ void key_operand(uint32_t (&b)[2], uint32_t codes) {
  b[0] = e4m3x2_to_f16x2(codes);
  b[1] = e4m3x2_to_f16x2(codes >> 16);
}

// Load quantized values of 16 rows for two steps: eight rows and eight rows of either step.
__device__ __forceinline__ void load_value_codes(uint32_t (&codes)[2][2], const uint4* tile,
                                                 int row, int pair) {
  load_value_columns_at<kCacheWords>(codes[0], codes[1], tile, row, pair);
}

// The B operands of 16 values: of the even columns of a step, and of its odd ones.
__device__ __forceinline__ void value_operands(uint32_t (&even)[2], uint32_t (&odd)[2],
                                               const uint32_t (&codes)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t apart = __byte_perm(codes[i], 0u, 0x3120u);
    even[i] = e4m3x2_to_f16x2(apart);
    odd[i] = e4m3x2_to_f16x2(apart >> 16);
  }
}
