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
