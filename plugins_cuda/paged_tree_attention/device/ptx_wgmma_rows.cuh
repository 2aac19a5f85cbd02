// wgmma for attention: scores that start from zero, and values that are stored key by key.
//
// Rows of 64, 128 or 256 columns are stored in shared memory as panels of 64 columns with all rows.
// 16-byte chunk c of row k is stored at chunk c ^ (k % 8) of its 128 bytes, the 128-byte swizzle.
// The same tile is B by columns (a score for each row) and, with `wgmma_bf16_rows`, B by rows (a
// sum over rows). For the rest see ptx_wgmma.cuh.
#pragma once

#include "../../_device/ptx_wgmma_shared.cuh"

// The index of 16-byte unit `unit` of row `row` in a tile of ``rows`` rows.
template <int width, int rows>
__device__ __forceinline__ constexpr int panel_unit(int row, int unit) {
  if (width == 64) return row * 8 + (unit ^ row % 8);
  return unit / 8 * (rows * 8) + row * 8 + (unit % 8 ^ row % 8);
}

// The offset of the descriptor of the 16 columns from 16·step on, in units.
template <int rows>
__device__ __forceinline__ constexpr int panel_step(int step) {
  return step / 4 * (rows * 8) + step % 4 * 2;
}

// The descriptor of a tile at this address (a multiple of 1024); 16 rows further is 128 units
// further.
template <int width, int rows>
__device__ __forceinline__ uint64_t panel_matrix(const void* shared) {
  static_assert(width % 64 == 0, "complete panels");
  return width == 64 ? wgmma_matrix(shared) : wgmma_columns(shared, rows * 128);
}

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
SPECBUILD_WGMMA_NEW(64, 32, 33, 34, 35, 36)
SPECBUILD_WGMMA_NEW(128, 64, 65, 66, 67, 68)

// D [64, columns] += A·B, with B by rows.
template <int columns>
__device__ __forceinline__ void wgmma_bf16_rows(float (&d)[columns / 2], const uint32_t (&a)[4],
                                                uint64_t b);

#define SPECBUILD_WGMMA_ROWS(columns, a0, a1, a2, a3, matrix)                              \
  template <>                                                                              \
  __device__ __forceinline__ void wgmma_bf16_rows<columns>(                                \
      float (&d)[columns / 2], const uint32_t (&a)[4], uint64_t b) {                       \
    asm volatile(                                                                          \
        "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 "                  \
        "{" SPECBUILD_LIST_##a0 "}, "                                                      \
        "{%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #matrix ", 1, 1, 1, 1;"              \
        : SPECBUILD_SUMS_##a0                                                              \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                             \
  }
SPECBUILD_WGMMA_ROWS(64, 32, 33, 34, 35, 36)
SPECBUILD_WGMMA_ROWS(128, 64, 65, 66, 67, 68)
SPECBUILD_WGMMA_ROWS(256, 128, 129, 130, 131, 132)
// clang-format on

#else

template <int columns>
void wgmma_bf16_new(float (&d)[columns / 2], const uint32_t (&a)[4], uint64_t b) {
  emulation::defer({d, a, b, columns, false, false});
}
template <int columns>
void wgmma_bf16_rows(float (&d)[columns / 2], const uint32_t (&a)[4], uint64_t b) {
  emulation::defer({d, a, b, columns, true, true});
}

#endif
