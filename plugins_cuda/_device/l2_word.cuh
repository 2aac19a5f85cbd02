// Reads of 64 bits that other CTAs or previous launches have written, through L2, and L2 prefetch.
#pragma once

#include "ptx.cuh"

// Prefetch a line of 128 bytes to L2. A prefetch is no read: it is safe for data that previous
// launches still write.
__device__ __forceinline__ void warm_l2(const void* address) {
#ifndef SPECBUILD_EMULATE
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}

__device__ __forceinline__ uint64_t load_l2_word(const uint64_t* address) {
#ifdef SPECBUILD_EMULATE
  return *address;
#else
  uint64_t v;
  asm volatile("ld.global.cg.u64 %0, [%1];" : "=l"(v) : "l"(address) : "memory");
  return v;
#endif
}

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
