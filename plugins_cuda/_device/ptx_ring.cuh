// Asynchronous copies that arrive at an mbarrier; the emulator replaces them by plain code.
#pragma once

#include "ptx.cuh"

// Arrive at ``barrier`` when all copies that this thread has started so far are complete. Copies
// write like ordinary stores: before wgmma reads the data, execute fence_async_shared().
__device__ __forceinline__ void cp_async_arrive(Mbarrier* barrier) {
#ifdef SPECBUILD_EMULATE
  mbarrier_arrive(barrier);
#else
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
#endif
}
