// PTX that attention alone uses; the emulator has a plain form of it.
#pragma once

#include "l2_word.cuh"

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
