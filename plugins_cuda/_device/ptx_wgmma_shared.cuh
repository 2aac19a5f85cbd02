// wgmma with both operands in shared memory, in the layouts of ptx_wgmma.cuh.
//
// A has 64 rows of 128 bytes in the layout of B: groups of 8 rows, in the 128-byte swizzle. B may
// also be stored by rows of K, 64 columns (128 bytes) of each in the same swizzle; the next 64
// columns follow as another panel. wgmma_fence, wgmma_commit, wgmma_wait and wgmma_pin are in
// ptx_wgmma.cuh.
#pragma once

#include "ptx_wgmma.cuh"

#ifndef SPECBUILD_EMULATE

// The descriptor of a matrix B with adjacent columns, aligned to 1024 bytes (2048 bytes further per
// 16 of K). Its panels of 64 columns are ``panel_bytes`` apart.
__device__ __forceinline__ uint64_t wgmma_columns(const void* shared, int panel_bytes) {
  const uint64_t groups_of_8_k = 1024 >> 4, swizzle_128 = 1;
  return ((shared_address(shared) & 0x3FFFFu) >> 4) |
         (static_cast<uint64_t>(panel_bytes >> 4) << 16) | (groups_of_8_k << 32) |
         (swizzle_128 << 62);
}

// D [64, columns] += A·B.
template <int columns>
__device__ __forceinline__ void wgmma_bf16_shared(float (&d)[columns / 2], uint64_t a, uint64_t b);

#define SPECBUILD_WGMMA_SHARED(columns, sums, b_operand)                                          \
  template <>                                                                                     \
  __device__ __forceinline__ void wgmma_bf16_shared<columns>(float (&d)[columns / 2], uint64_t a, \
                                                             uint64_t b) {                        \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns                                     \
                 "k16.f32.bf16.bf16 "                                                             \
                 "{" SPECBUILD_LIST_##sums "}, %" #sums ", %" #b_operand ", 1, 1, 1, 0, 0;"       \
                 : SPECBUILD_SUMS_##sums                                                          \
                 : "l"(a), "l"(b));                                                               \
  }
SPECBUILD_WGMMA_SHARED(32, 16, 17)
SPECBUILD_WGMMA_SHARED(64, 32, 33)

// D [64, columns] += A·B, where B has adjacent columns.
template <int columns>
__device__ __forceinline__ void wgmma_bf16_columns(float (&d)[columns / 2], uint64_t a, uint64_t b);

#define SPECBUILD_WGMMA_COLUMNS(columns, sums, b_operand)                                          \
  template <>                                                                                      \
  __device__ __forceinline__ void wgmma_bf16_columns<columns>(float (&d)[columns / 2], uint64_t a, \
                                                              uint64_t b) {                        \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns                                      \
                 "k16.f32.bf16.bf16 "                                                              \
                 "{" SPECBUILD_LIST_##sums "}, %" #sums ", %" #b_operand ", 1, 1, 1, 0, 1;"        \
                 : SPECBUILD_SUMS_##sums                                                           \
                 : "l"(a), "l"(b));                                                                \
  }
SPECBUILD_WGMMA_COLUMNS(64, 32, 33)
SPECBUILD_WGMMA_COLUMNS(128, 64, 65)
SPECBUILD_WGMMA_COLUMNS(192, 96, 97)
SPECBUILD_WGMMA_COLUMNS(256, 128, 129)

#else

inline uint64_t wgmma_columns(const void* s, int panel_bytes) {
  return (shared_address(s) & 0x3FFFFu) >> 4 | static_cast<uint64_t>(panel_bytes >> 4) << 16 |
         uint64_t{64} << 32 | uint64_t{1} << 62;
}
template <int columns>
void wgmma_bf16_shared(float (&d)[columns / 2], uint64_t a, uint64_t b) {
  emulation::defer({d, nullptr, b, columns, true, false, 0, a});
}
template <int columns>
void wgmma_bf16_columns(float (&d)[columns / 2], uint64_t a, uint64_t b) {
  emulation::defer({d, nullptr, b, columns, true, true, 0, a});
}

#endif
