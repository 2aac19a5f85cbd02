// 64-bit words that other CTAs of a launch, or launches in front, have written.
#pragma once

#include "ptx.cuh"

__device__ __forceinline__ uint64_t load_l2_word(const uint64_t* address) {
  const int* halves = reinterpret_cast<const int*>(address);
  return static_cast<uint64_t>(static_cast<uint32_t>(load_l2_int(halves + 1))) << 32 |
         static_cast<uint32_t>(load_l2_int(halves));
}
