// A barrier of several CTAs of a launch. The emulator has none, because it runs CTAs in sequence.
#pragma once

#include "arrival.cuh"

#ifndef SPECBUILD_EMULATE

// Read with acquire semantics: writes before the matching release are visible afterwards.
__device__ __forceinline__ int load_acquired(const int* address) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
  return v;
}

// A barrier of ``ctas`` CTAs with adjacent indices. It relies on GPUs starting CTAs in grid order,
// which CUDA does not guarantee but which was observed. Then only the last started CTAs can wait
// for CTAs that have not started. There is no deadlock if the adjacent CTAs fit on the GPU
// together. ``count`` is 0 before and after. Its lower 16 bits count the CTAs that have arrived,
// the upper ones those that have left. Thread kThread maintains it.
template <int kThread>
class CtaBarrier {
 public:
  // Call it after the writes of this CTA.
  __device__ __forceinline__ CtaBarrier(int* count, int ctas) : count_(count), ctas_(ctas) {
    __syncthreads();
    if (threadIdx.x == kThread) arrived_ = arrive(count_) + 1;
  }
  // Call it before reading the writes of other CTAs.
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
  int arrived_ = 0, left_ = 0;  // valid in thread kThread
};

#endif
