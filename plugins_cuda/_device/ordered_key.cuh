// Floats as unsigned keys of the same order, and keys combined with indices: the lower index wins
// ties.
#pragma once

#include "ptx_routing.cuh"

// −0 equals +0. A NaN is above or below all numbers, by its sign.
__device__ __forceinline__ uint32_t ordered_key(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float key_value(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}

// Order by key, then by lower index.
__device__ __forceinline__ uint64_t ranked_key(uint32_t key, uint32_t index) {
  return static_cast<uint64_t>(key) << 32 | (~index);
}

__device__ __forceinline__ uint32_t ranked_index(uint64_t ranked) {
  return ~static_cast<uint32_t>(ranked);
}

__device__ __forceinline__ float ranked_value(uint64_t ranked) {
  return key_value(static_cast<uint32_t>(ranked >> 32));
}

__device__ __forceinline__ uint64_t warp_max(uint64_t value) {
  const uint32_t key = static_cast<uint32_t>(value >> 32);
  const uint32_t maximum = warp_max(key);
  const uint32_t low = warp_max(key == maximum ? static_cast<uint32_t>(value) : 0u);
  return static_cast<uint64_t>(maximum) << 32 | low;
}
