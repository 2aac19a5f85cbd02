// What is kept in registers and what is not, where they are short; the emulator has plain forms.
#pragma once

#include "../../_device/types.cuh"

#ifndef SPECBUILD_EMULATE

// This thread's index, looked up anew: no register holds it meanwhile.
__device__ __forceinline__ unsigned thread_anew() {
  unsigned x;
  asm volatile("mov.u32 %0, %tid.x;" : "=r"(x));
  return x;
}

// The same pointer, which a register holds from here on: nvcc would work it out again and again.
template <class T>
__device__ __forceinline__ T* in_register(T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

#endif
