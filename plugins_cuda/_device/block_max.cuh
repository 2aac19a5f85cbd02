// The largest ranked key of a CTA.
#pragma once

#include "ordered_key.cuh"

// Of all threads of ``warps`` warps, a power of two of them; every thread gets it. ``of_warps``: in
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
