// Warp-wide integer reductions.
#pragma once

#include "types.cuh"

#ifdef SPECBUILD_EMULATE

__device__ inline uint32_t warp_max(uint32_t value) {
  for (int offset = 16; offset > 0; offset /= 2) {
    const uint32_t other = __shfl_xor_sync(~0u, value, offset);
    value = other > value ? other : value;
  }
  return value;
}
__device__ inline int warp_min(int value) {
  for (int offset = 16; offset > 0; offset /= 2) {
    const int other = __shfl_xor_sync(~0u, value, offset);
    value = other < value ? other : value;
  }
  return value;
}
__device__ inline int warp_max_int(int value) {
  return -warp_min(-value);
}

#else

__device__ __forceinline__ uint32_t warp_max(uint32_t value) {
  uint32_t best;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(best) : "r"(value));
  return best;
}

__device__ __forceinline__ int warp_min(int value) {
  int minimum;
  asm volatile("redux.sync.min.s32 %0, %1, 0xffffffff;" : "=r"(minimum) : "r"(value));
  return minimum;
}

__device__ __forceinline__ int warp_max_int(int value) {
  int maximum;
  asm volatile("redux.sync.max.s32 %0, %1, 0xffffffff;" : "=r"(maximum) : "r"(value));
  return maximum;
}

#endif

// Return the sum over this lane and those below it.
__device__ __forceinline__ int warp_prefix_sum(int value, int lane) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_sync(~0u, value, lane - offset < 0 ? lane : lane - offset);
    if (lane >= offset) value += other;
  }
  return value;
}

__device__ __forceinline__ int warp_prefix_sum(int value) {
  return warp_prefix_sum(value, threadIdx.x % 32);
}
