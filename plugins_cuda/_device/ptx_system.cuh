// What the host sees of the device's writes to its memory, and in what order.
#pragma once

#include "types.cuh"

#ifdef SPECBUILD_EMULATE

__device__ inline void fence_system() {}

__device__ inline void store_system(int* address, int value) {
  *address = value;
}

#else

// What this thread wrote before is visible to the host before what is written after.
__device__ __forceinline__ void fence_system() {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}

// A store that the host may poll for.
__device__ __forceinline__ void store_system(int* address, int value) {
  asm volatile("st.relaxed.sys.global.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

#endif
