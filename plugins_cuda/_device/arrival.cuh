// Detection of the last CTA of those that share a result.
#pragma once

#include "types.cuh"

// Count an arrival and return the number of earlier ones. One thread calls it after a barrier of
// its CTA. Writes of the CTA before the barrier are visible to CTAs that arrive later, after a
// barrier of their own.
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

// Return whether this CTA is the last of the ``ctas`` that share ``count``, which is 0 before the
// first arrival and after the last. All threads call it; ``last`` is in shared memory.
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

// Return whether this warp is the last of ``ctas`` warps, one per CTA, that share ``count``. The
// count is 0 before the first arrival and after the last.
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
