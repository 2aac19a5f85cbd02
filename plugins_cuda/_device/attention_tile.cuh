// Tiles of keys and values in shared memory, and their fragments for tensor cores.
//
// A tile is [keys][width] bf16. Its 16-byte units are permuted within 128 bytes so that the eight
// rows of an ldmatrix are in different banks. For heads of 80 and 96, a row is padded by a unit.
#pragma once

#include "ptx_attention.cuh"

// The stride of rows, in units of 16 bytes.
template <int width>
__device__ __forceinline__ constexpr int tile_row_units() {
  constexpr int kUnits = width / 8;
  static_assert(width % 16 == 0, "heads are multiples of m16 tiles");
  return (kUnits & (kUnits - 1)) == 0 ? kUnits : kUnits | 1;
}

// The index of 16-byte unit `unit` of row `row`.
template <int width>
__device__ __forceinline__ constexpr int tile_unit(int row, int unit) {
  constexpr int kUnits = width / 8, kAcross = kUnits < 8 ? kUnits : 8;
  if (tile_row_units<width>() != kUnits) return row * tile_row_units<width>() + unit;
  return row * kUnits + (unit ^ (row / (8 / kAcross) % kAcross));
}

// The row of 16 whose address a lane gives to ldmatrix, for the operands below.
__device__ __forceinline__ int key_row() {
  const int lane = threadIdx.x % 32;
  return lane / 16 * 8 + lane % 8;
}

__device__ __forceinline__ int value_row() {
  return static_cast<int>(threadIdx.x) % 16;
}

// Load 16 keys as two B operands (16 columns from 16·step × 8 keys each); `row` is this lane's.
template <int width>
__device__ __forceinline__ void load_key_columns_at(uint32_t (&first)[2], uint32_t (&second)[2],
                                                    const uint4* tile, int row, int step) {
  const int unit = 2 * step + static_cast<int>(threadIdx.x) % 32 / 8 % 2;
  uint32_t r[4];
  ldmatrix_x4(r, tile + tile_unit<width>(row, unit));
  first[0] = r[0], first[1] = r[1], second[0] = r[2], second[1] = r[3];
}

// Load 16 values as two B operands (16 keys × 8 columns each, from 16·part); `row` is this lane's.
template <int width>
__device__ __forceinline__ void load_value_columns_at(uint32_t (&first)[2], uint32_t (&second)[2],
                                                      const uint4* tile, int row, int part) {
  const int unit = 2 * part + static_cast<int>(threadIdx.x) % 32 / 16;
  uint32_t r[4];
  ldmatrix_x4_transposed(r, tile + tile_unit<width>(row, unit));
  first[0] = r[0], first[1] = r[1], second[0] = r[2], second[1] = r[3];
}

// The same for the 16 keys from `key` on.
template <int width>
__device__ __forceinline__ void load_key_columns(uint32_t (&first)[2], uint32_t (&second)[2],
                                                 const uint4* tile, int key, int step) {
  load_key_columns_at<width>(first, second, tile, key + key_row(), step);
}

template <int width>
__device__ __forceinline__ void load_value_columns(uint32_t (&first)[2], uint32_t (&second)[2],
                                                   const uint4* tile, int key, int part) {
  load_value_columns_at<width>(first, second, tile, key + value_row(), part);
}
