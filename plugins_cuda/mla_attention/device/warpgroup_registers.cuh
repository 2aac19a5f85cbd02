// Registers that the warpgroups of a CTA give each other.
#pragma once

#include "../../_device/ptx_wgmma.cuh"

// The registers of each thread of a warpgroup from here on, in a CTA of so many threads.
template <int threads, int count>
__device__ __forceinline__ void registers_set() {
  constexpr int kAtEntry = registers_at_entry(threads);
  if constexpr (count > kAtEntry) registers_raise<count>();
  if constexpr (count < kAtEntry) registers_lower<count>();
}
