// wgmma as attention uses it: scores that begin anew, and values that lie key by key.
//
// `wgmma_bf16_rows` takes B [16 keys, 64 columns] as the keys' rows of 128 bytes stand in shared
// memory, in the same 128-byte swizzle: row k's 16-byte chunk c stands at chunk c ^ (k % 8). The
// rest is as in ptx_wgmma.cuh.
#pragma once

#include "ptx_wgmma.cuh"

#ifndef SPECBUILD_EMULATE

// D [64, columns] = A·B.
template <int columns>
__device__ __forceinline__ void wgmma_bf16_new(float (&d)[columns / 2], const uint32_t (&a)[4],
                                               uint64_t b);

// clang-format off
#define SPECBUILD_WGMMA_NEW(columns, a0, a1, a2, a3, matrix)                               \
  template <>                                                                              \
  __device__ __forceinline__ void wgmma_bf16_new<columns>(                                 \
      float (&d)[columns / 2], const uint32_t (&a)[4], uint64_t b) {                       \
    asm volatile(                                                                          \
        "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 "                  \
        "{" SPECBUILD_LIST_##a0 "}, "                                                      \
        "{%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #matrix ", 0, 1, 1, 0;"              \
        : SPECBUILD_SUMS_##a0                                                              \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                             \
  }
SPECBUILD_WGMMA_NEW(32, 16, 17, 18, 19, 20)
SPECBUILD_WGMMA_NEW(128, 64, 65, 66, 67, 68)
// clang-format on

// D [64, 64] += A·B.
__device__ __forceinline__ void wgmma_bf16_rows(float (&d)[32], const uint32_t (&a)[4],
                                                uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{" SPECBUILD_LIST_32 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
      : SPECBUILD_SUMS_32
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#else

template <int columns>
void wgmma_bf16_new(float (&d)[columns / 2], const uint32_t (&a)[4], uint64_t b) {
  emulation::defer({d, a, b, columns, false, false});
}
inline void wgmma_bf16_rows(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  emulation::defer({d, a, b, 64, true, true});
}

#endif
