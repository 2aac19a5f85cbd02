// Floats as unsigned keys of the same order, and keys with indices of which the lower wins ties.
#pragma once

#include "types.cuh"

// −0 equals +0; a NaN stands at one end.
__device__ __forceinline__ uint32_t ordered_key(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float key_value(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}

// The larger of two ranked keys has the larger key, or the same one and the lower index.
__device__ __forceinline__ uint64_t ranked_key(uint32_t key, uint32_t index) {
  return static_cast<uint64_t>(key) << 32 | (~index);
}

__device__ __forceinline__ uint32_t ranked_index(uint64_t ranked) {
  return ~static_cast<uint32_t>(ranked);
}

__device__ __forceinline__ uint64_t warp_max(uint64_t value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const uint32_t high = static_cast<uint32_t>(value >> 32), low = static_cast<uint32_t>(value);
    const uint64_t other = static_cast<uint64_t>(__shfl_xor_sync(0xFFFFFFFFu, high, distance))
                               << 32 |
                           __shfl_xor_sync(0xFFFFFFFFu, low, distance);
    value = other > value ? other : value;
  }
  return value;
}
