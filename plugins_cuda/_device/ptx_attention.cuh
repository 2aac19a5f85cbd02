// PTX that attention alone uses; the emulator has a plain form of it.
#pragma once

#include "ptx.cuh"

// Asks for a line of 128 bytes in L2. It is no read: what launches in front still write stays
// right.
__device__ __forceinline__ void warm_l2(const void* address) {
#ifndef SPECBUILD_EMULATE
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}

// 8 bytes from L2: what another CTA of the same launch has written.
__device__ __forceinline__ float2 load_l2_float2(const float2* address) {
#ifdef SPECBUILD_EMULATE
  return *address;
#else
  float2 v;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];"
               : "=f"(v.x), "=f"(v.y)
               : "l"(address)
               : "memory");
  return v;
#endif
}

// The value, of which the compiler knows nothing: what is made of it in a loop is made there, and
// keeps no registers meanwhile.
__device__ __forceinline__ int made_anew(int value) {
#ifndef SPECBUILD_EMULATE
  asm volatile("" : "+r"(value));
#endif
  return value;
}
