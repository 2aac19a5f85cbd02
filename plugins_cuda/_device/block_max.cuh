// The maximum of ranked keys over a CTA.
#pragma once

#include "ordered_key.cuh"

// Return the maximum over ``warps`` warps, a power of two, to every thread. ``of_warps`` is in
// shared memory.
template <int warps>
__device__ __forceinline__ uint64_t block_max(uint64_t value, uint64_t (&of_warps)[warps]) {
  static_assert((warps & (warps - 1)) == 0 && warps <= 32, "lanes read all of them");
  value = warp_max(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  return warp_max(of_warps[threadIdx.x % warps]);
}
