// Copies that announce themselves to a barrier; the emulator has a plain form of it.
#pragma once

#include "ptx.cuh"

// One arrival at ``barrier``, when all copies that this thread has started so far have landed. They
// land as ordinary stores do: who reads them by wgmma executes fence_async_shared() first.
__device__ __forceinline__ void cp_async_arrive(Mbarrier* barrier) {
#ifdef SPECBUILD_EMULATE
  mbarrier_arrive(barrier);
#else
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
#endif
}
