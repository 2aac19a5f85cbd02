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

// How L2 treats what makes room first.
__device__ __forceinline__ uint64_t evict_first_policy() {
#ifdef SPECBUILD_EMULATE
  return 0;
#else
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
#endif
}

// cp_async_16_or_zero() by such a policy.
__device__ __forceinline__ void cp_async_16_or_zero_by(uint64_t policy, void* shared,
                                                       const void* global, bool valid) {
#ifdef SPECBUILD_EMULATE
  cp_async_16_or_zero(shared, global, valid);
#else
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(valid ? 16 : 0), "l"(policy)
               : "memory");
#endif
}
