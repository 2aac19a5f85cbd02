// PTX of the attention kernels; the emulator replaces it by plain code.
#pragma once

#include "l2_word.cuh"

// Return the value, opaque to the compiler. Results that a loop derives from it are not hoisted out
// of the loop, where they would occupy registers.
__device__ __forceinline__ int opaque(int value) {
#ifndef SPECBUILD_EMULATE
  asm volatile("" : "+r"(value));
#endif
  return value;
}

// The L2 policy of data that is evicted first.
__device__ __forceinline__ uint64_t evict_first_policy() {
#ifdef SPECBUILD_EMULATE
  return 0;
#else
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
#endif
}

// cp_async_16_or_zero() with an L2 policy.
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
