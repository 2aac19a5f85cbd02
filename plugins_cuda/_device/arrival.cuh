// How the CTAs that share a result find out which of them is the last.
#pragma once

#include "types.cuh"

// How many arrived before. One thread calls it, behind a barrier of its CTA: all that the CTA wrote
// in front of that is visible to whoever arrives later, behind a barrier of its own.
__device__ __forceinline__ int arrive(int* count) {
#ifdef SPECBUILD_EMULATE
  return atomicAdd(count, 1);
#else
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(count)
               : "memory");
  return before;
#endif
}

// Whether this CTA is the last of the `ctas` that share a count: 0 before the first and behind the
// last of them. By all threads; `last` is in shared memory.
__device__ __forceinline__ bool is_last_of(int* count, int ctas, volatile int* last) {
  __syncthreads();
  if (threadIdx.x == 0) {
    const bool is_last = ctas == 1 || arrive(count) == ctas - 1;
    if (is_last && ctas > 1) *count = 0;
    *last = is_last;
  }
  __syncthreads();
  return *last != 0;
}

// Whether this warp is the last of the ``ctas`` that share a count, one warp of each; 0 before and
// after.
__device__ __forceinline__ bool is_last_warp_of(int* count, int ctas) {
  if (ctas == 1) return true;
  int before = 0;
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    before = arrive(count);
    if (before == ctas - 1) *count = 0;
  }
  return __shfl_sync(kAllLanes, before, 0) == ctas - 1;
}
