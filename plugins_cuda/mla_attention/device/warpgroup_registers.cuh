// The reallocation of registers between the warpgroups of a CTA.
#pragma once

#include "../../_device/ptx_wgmma.cuh"

// Set the registers of each thread of a warpgroup, in a CTA of ``threads`` threads.
template <int threads, int count>
__device__ __forceinline__ void registers_set() {
  constexpr int kAtEntry = registers_at_entry(threads);
  if constexpr (count > kAtEntry) registers_raise<count>();
  if constexpr (count < kAtEntry) registers_lower<count>();
}
