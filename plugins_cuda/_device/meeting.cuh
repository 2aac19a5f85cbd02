// CTAs of a launch that wait for each other. The emulator, which runs one after the other, has
// none.
#pragma once

#include "arrival.cuh"

#ifndef SPECBUILD_EMULATE

// What stands there, and all that whoever left it there had written before.
__device__ __forceinline__ int load_acquired(const int* address) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
  return v;
}

// ``ctas`` CTAs that wait for what all of them wrote. They adjoin in the grid, and GPUs start CTAs
// in the order of the grid (as seen, not as promised): of those that have begun only the last ones
// can lack others, so nobody waits forever where those that adjoin fit the GPU. ``count``: 0 before
// and after; thread kThread counts those that arrived and, from bit 16 on, those that left.
template <int kThread>
class Meeting {
 public:
  // Behind this CTA's own writes.
  __device__ __forceinline__ Meeting(int* count, int ctas) : count_(count), ctas_(ctas) {
    __syncthreads();
    if (threadIdx.x == kThread) arrived_ = arrive(count_) + 1;
  }
  // In front of reading what the others wrote.
  __device__ __forceinline__ void wait() {
    if (threadIdx.x == kThread) {
      while ((arrived_ & 0xFFFF) < ctas_) arrived_ = load_acquired(count_);
      left_ = atomicAdd(count_, 1 << 16) >> 16;
    }
    __syncthreads();
  }
  __device__ __forceinline__ void leave() const {
    if (threadIdx.x == kThread && left_ == ctas_ - 1) *count_ = 0;
  }

 private:
  int* count_;
  int ctas_;
  int arrived_ = 0, left_ = 0;  // that thread's
};

#endif
