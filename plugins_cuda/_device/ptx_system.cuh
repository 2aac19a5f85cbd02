// Ordered writes to host memory.
#pragma once

#include "types.cuh"

#ifdef SPECBUILD_EMULATE

__device__ inline void fence_system() {}

__device__ inline void store_system(int* address, int value) {
  *address = value;
}

#else

// Make earlier writes of this thread visible to the host before later ones.
__device__ __forceinline__ void fence_system() {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}

// Store a value that the host polls.
__device__ __forceinline__ void store_system(int* address, int value) {
  asm volatile("st.relaxed.sys.global.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

#endif
