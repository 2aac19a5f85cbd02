// Asynchronous copies of lists of 32-bit words to shared memory, with one wait for all of them.
#pragma once

#include "ptx.cuh"

// One warp copies ``count`` words that previous launches have written.
template <typename Word>
__device__ __forceinline__ void stage_words(Word* shared, const Word* global, int count) {
  static_assert(sizeof(Word) == 4, "copies of four bytes");
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < count; i += 32) {
#ifdef SPECBUILD_EMULATE
    shared[i] = global[i];
#else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared + i)),
                 "l"(global + i)
                 : "memory");
#endif
  }
}

// Wait until everything that this warp staged is visible to all its lanes.
__device__ __forceinline__ void wait_for_staged() {
  cp_async_commit();
  cp_async_wait<0>();
  __syncwarp();
}
