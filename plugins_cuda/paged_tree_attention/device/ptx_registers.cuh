// Control of register allocation; the emulator replaces it by plain code.
#pragma once

#include "../../_device/types.cuh"

#ifndef SPECBUILD_EMULATE

// This thread's index, read again, so that it occupies no register in between.
__device__ __forceinline__ unsigned thread_anew() {
  unsigned x;
  asm volatile("mov.u32 %0, %tid.x;" : "=r"(x));
  return x;
}

// The same pointer in a register: otherwise nvcc computes it repeatedly.
template <class T>
__device__ __forceinline__ T* in_register(T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

#endif
