// A row of a table of bf16 rows. The table is in row order or a packed weight (linear/packing.py);
// a packed row has 64 bytes in each block of 32 columns.
#pragma once

#include "types.cuh"

struct TableRow {
  const uint16_t* first;
  bool packed;

  static __device__ __forceinline__ TableRow in_order(const uint16_t* first) {
    return {first, false};
  }
  static __device__ __forceinline__ TableRow of(const uint16_t* table, int64_t row, int width,
                                                bool packed) {
    if (!packed) return in_order(table + row * width);
    const int64_t tile = row / 16 * width * 16;
    return {table + tile + row % 16 / 8 * 256 + row % 8 * 32, true};
  }

  // Return the address of eight values; ``element`` is a multiple of 8.
  __device__ __forceinline__ const uint16_t* operator+(int element) const {
    return first + (packed ? element / 32 * 512 + element % 32 : element);
  }
};
