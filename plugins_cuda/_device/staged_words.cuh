// Lists of 32-bit words in shared memory, all sent for before the first is waited for.
#pragma once

#include "ptx.cuh"

// By one warp, ``count`` words of what launches in front have written.
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

// Until all that this warp staged is there, for all its lanes.
__device__ __forceinline__ void wait_for_staged() {
  cp_async_commit();
  cp_async_wait<0>();
  __syncwarp();
}
