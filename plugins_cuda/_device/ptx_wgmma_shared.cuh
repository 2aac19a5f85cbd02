// wgmma with both operands in shared memory, in the layout of ptx_wgmma.cuh.
//
// A is 64 rows of 128 bytes as B is: rows in groups of 8, in the 128-byte swizzle. wgmma_fence,
// wgmma_commit and wgmma_pin are those of ptx_wgmma.cuh.
#pragma once

#include "ptx_wgmma.cuh"

#ifndef SPECBUILD_EMULATE

__device__ __forceinline__ void wgmma_wait_shared() {
  wgmma_wait<0>();
}

// D [64, 32] += A·B.
__device__ __forceinline__ void wgmma_bf16_shared(float (&d)[16], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{" SPECBUILD_LIST_16 "}, %16, %17, 1, 1, 1, 0, 0;"
      : SPECBUILD_SUMS_16
      : "l"(a), "l"(b));
}

#else

namespace emulation {
struct PendingShared {
  float* sums;
  uint64_t a, b;
};
// By thread: a wgmma runs when it is waited for.
inline std::vector<PendingShared> pending_shared[1024];

inline float element(uint64_t matrix, unsigned row, unsigned k) {
  const uint64_t start = (matrix & 0x3FFF) << 4, stride = (matrix >> 32 & 0x3FFF) << 4;
  if (matrix >> 62 != 1) std::abort();
  const uint64_t linear = start + row / 8 * stride + row % 8 * 128 + 2 * k;
  uint16_t bits;
  std::memcpy(&bits, shared + (linear ^ (linear >> 3 & 0x70)), 2);
  return bf16_half(bits, 0);
}
}  // namespace emulation

inline void wgmma_wait_shared() {
  __syncwarp();
  auto& pending = emulation::pending_shared[emulation::current];
  const unsigned lane = emulation::current % 32, warp = emulation::current / 32 % 4;
  for (const auto& one : pending) {
    for (unsigned i = 0; i < 16; ++i) {
      const unsigned row = 16 * warp + lane / 4 + i % 4 / 2 * 8;
      const unsigned column = i / 4 * 8 + 2 * (lane % 4) + i % 2;
      for (unsigned k = 0; k < 16; ++k) {
        one.sums[i] += emulation::element(one.a, row, k) * emulation::element(one.b, column, k);
      }
    }
  }
  pending.clear();
}
inline void wgmma_bf16_shared(float (&d)[16], uint64_t a, uint64_t b) {
  emulation::pending_shared[emulation::current].push_back({d, a, b});
}

#endif
