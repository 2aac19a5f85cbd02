// wgmma of Hopper (sm_90a) with the weights in registers, and the preparation of its operands.
//
// One wgmma adds A·B of 64×16 by 16×N to D, bf16 with fp32 sums, for a warpgroup: four consecutive
// warps, the first a multiple of four. Warp w holds A rows 16w … 16w+15 as the A operand of
// mma.m16n8k16 (ptx.cuh), and the same rows of D: sums 4j … 4j+3 of a lane are d0 … d3 of the mma
// of columns 8j … 8j+7. B is in shared memory, column (token) by column, 128 bytes = 64 values of K
// each, in the 128-byte swizzle: 16-byte chunk c of column n is stored at chunk c ^ (n % 8).
#pragma once

#include "ptx.cuh"

// The registers of each thread at entry, if a CTA of ``threads`` is alone on its SM. Warpgroups can
// raise theirs by the number that others released; a larger request never returns.
__device__ constexpr int registers_at_entry(int threads) {
  return (64 << 10) / threads / 8 * 8;
}

#ifndef SPECBUILD_EMULATE

// The descriptor of a matrix at this address (a multiple of 1024, plus 32 bytes per 16 of K).
__device__ __forceinline__ uint64_t wgmma_matrix(const void* shared) {
  const uint64_t groups_of_8_columns = 1024 >> 4, swizzle_128 = 1;
  return ((shared_address(shared) & 0x3FFFFu) >> 4) | (uint64_t{1} << 16) |
         (groups_of_8_columns << 32) | (swizzle_128 << 62);
}

// Required before the first wgmma, and after other accesses to registers of A or D.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Wait until all but the last `pending` commit groups are complete: D may be read, A overwritten,
// and the stage of B released.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Change the registers of each thread of a warpgroup. Use it in kernels with a register limit at
// entry, in separate branches of the warpgroups. All four warps call it.
template <int count>
__device__ __forceinline__ void registers_raise() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ __forceinline__ void registers_lower() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

// Keep the compiler from moving registers of D or A across this point.
template <int count>
__device__ __forceinline__ void wgmma_pin(float (&sums)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

template <int slices>
__device__ __forceinline__ void wgmma_pin(uint32_t (&a)[slices][4]) {
#pragma unroll
  for (int i = 0; i < 4 * slices; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
}

// D += A·B.
template <int columns>
__device__ __forceinline__ void wgmma_bf16(float (&d)[columns / 2], const uint32_t (&a)[4],
                                           uint64_t b);

// clang-format off
#define SPECBUILD_LIST_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SPECBUILD_LIST_16 SPECBUILD_LIST_8 ", " "%8, %9, %10, %11, %12, %13, %14, %15"
#define SPECBUILD_LIST_24 SPECBUILD_LIST_16 ", " "%16, %17, %18, %19, %20, %21, %22, %23"
#define SPECBUILD_LIST_32 SPECBUILD_LIST_24 ", " "%24, %25, %26, %27, %28, %29, %30, %31"
#define SPECBUILD_LIST_40 SPECBUILD_LIST_32 ", " "%32, %33, %34, %35, %36, %37, %38, %39"
#define SPECBUILD_LIST_48 SPECBUILD_LIST_40 ", " "%40, %41, %42, %43, %44, %45, %46, %47"
#define SPECBUILD_LIST_56 SPECBUILD_LIST_48 ", " "%48, %49, %50, %51, %52, %53, %54, %55"
#define SPECBUILD_LIST_64 SPECBUILD_LIST_56 ", " "%56, %57, %58, %59, %60, %61, %62, %63"
#define SPECBUILD_LIST_72 SPECBUILD_LIST_64 ", " "%64, %65, %66, %67, %68, %69, %70, %71"
#define SPECBUILD_LIST_80 SPECBUILD_LIST_72 ", " "%72, %73, %74, %75, %76, %77, %78, %79"
#define SPECBUILD_LIST_88 SPECBUILD_LIST_80 ", " "%80, %81, %82, %83, %84, %85, %86, %87"
#define SPECBUILD_LIST_96 SPECBUILD_LIST_88 ", " "%88, %89, %90, %91, %92, %93, %94, %95"
#define SPECBUILD_LIST_104 SPECBUILD_LIST_96 ", " "%96, %97, %98, %99, %100, %101, %102, %103"
#define SPECBUILD_LIST_112 SPECBUILD_LIST_104 ", " "%104, %105, %106, %107, %108, %109, %110, %111"
#define SPECBUILD_LIST_120 SPECBUILD_LIST_112 ", " "%112, %113, %114, %115, %116, %117, %118, %119"
#define SPECBUILD_LIST_128 SPECBUILD_LIST_120 ", " "%120, %121, %122, %123, %124, %125, %126, %127"

#define SPECBUILD_SUMS_AT(i)                                                               \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define SPECBUILD_SUMS_8 SPECBUILD_SUMS_AT(0)
#define SPECBUILD_SUMS_16 SPECBUILD_SUMS_8, SPECBUILD_SUMS_AT(8)
#define SPECBUILD_SUMS_24 SPECBUILD_SUMS_16, SPECBUILD_SUMS_AT(16)
#define SPECBUILD_SUMS_32 SPECBUILD_SUMS_24, SPECBUILD_SUMS_AT(24)
#define SPECBUILD_SUMS_40 SPECBUILD_SUMS_32, SPECBUILD_SUMS_AT(32)
#define SPECBUILD_SUMS_48 SPECBUILD_SUMS_40, SPECBUILD_SUMS_AT(40)
#define SPECBUILD_SUMS_56 SPECBUILD_SUMS_48, SPECBUILD_SUMS_AT(48)
#define SPECBUILD_SUMS_64 SPECBUILD_SUMS_56, SPECBUILD_SUMS_AT(56)
#define SPECBUILD_SUMS_72 SPECBUILD_SUMS_64, SPECBUILD_SUMS_AT(64)
#define SPECBUILD_SUMS_80 SPECBUILD_SUMS_72, SPECBUILD_SUMS_AT(72)
#define SPECBUILD_SUMS_88 SPECBUILD_SUMS_80, SPECBUILD_SUMS_AT(80)
#define SPECBUILD_SUMS_96 SPECBUILD_SUMS_88, SPECBUILD_SUMS_AT(88)
#define SPECBUILD_SUMS_104 SPECBUILD_SUMS_96, SPECBUILD_SUMS_AT(96)
#define SPECBUILD_SUMS_112 SPECBUILD_SUMS_104, SPECBUILD_SUMS_AT(104)
#define SPECBUILD_SUMS_120 SPECBUILD_SUMS_112, SPECBUILD_SUMS_AT(112)
#define SPECBUILD_SUMS_128 SPECBUILD_SUMS_120, SPECBUILD_SUMS_AT(120)

// The operands after D are numbered: a0 … a3, the matrix.
#define SPECBUILD_WGMMA(columns, a0, a1, a2, a3, matrix)                                   \
  template <>                                                                              \
  __device__ __forceinline__ void wgmma_bf16<columns>(                                     \
      float (&d)[columns / 2], const uint32_t (&a)[4], uint64_t b) {                       \
    asm volatile(                                                                          \
        "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 "                  \
        "{" SPECBUILD_LIST_##a0 "}, "                                                      \
        "{%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #matrix ", 1, 1, 1, 0;"              \
        : SPECBUILD_SUMS_##a0                                                              \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                             \
  }
SPECBUILD_WGMMA(16, 8, 9, 10, 11, 12)
SPECBUILD_WGMMA(32, 16, 17, 18, 19, 20)
SPECBUILD_WGMMA(48, 24, 25, 26, 27, 28)
SPECBUILD_WGMMA(64, 32, 33, 34, 35, 36)
SPECBUILD_WGMMA(80, 40, 41, 42, 43, 44)
SPECBUILD_WGMMA(96, 48, 49, 50, 51, 52)
SPECBUILD_WGMMA(112, 56, 57, 58, 59, 60)
SPECBUILD_WGMMA(128, 64, 65, 66, 67, 68)
SPECBUILD_WGMMA(144, 72, 73, 74, 75, 76)
SPECBUILD_WGMMA(160, 80, 81, 82, 83, 84)
SPECBUILD_WGMMA(176, 88, 89, 90, 91, 92)
SPECBUILD_WGMMA(192, 96, 97, 98, 99, 100)
SPECBUILD_WGMMA(208, 104, 105, 106, 107, 108)
SPECBUILD_WGMMA(224, 112, 113, 114, 115, 116)
SPECBUILD_WGMMA(240, 120, 121, 122, 123, 124)
SPECBUILD_WGMMA(256, 128, 129, 130, 131, 132)
// clang-format on

// Transpose an 8×8 matrix of 16-bit elements. Lane 4·g + t passes elements 2t (low half) and 2t + 1
// of row g, and receives those of column g.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t pair) {
  uint32_t out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
  return out;
}

#else

inline uint64_t wgmma_matrix(const void* s) {
  return (shared_address(s) & 0x3FFFFu) >> 4 | uint64_t{1} << 16 | uint64_t{64} << 32 |
         uint64_t{1} << 62;
}
inline void wgmma_fence() {}
inline void wgmma_commit() {
  emulation::commit_wgmmas();
}
template <int last>
void wgmma_wait() {
  emulation::wait_for_wgmmas(last);
}
template <int count>
void registers_raise() {}
template <int count>
void registers_lower() {}
template <int count>
void wgmma_pin(float (&)[count]) {}
template <int slices>
void wgmma_pin(uint32_t (&)[slices][4]) {}
template <int columns>
void wgmma_bf16(float (&d)[columns / 2], const uint32_t (&a)[4], uint64_t b) {
  static_assert(columns % 16 == 0 && columns <= 256);
  emulation::defer({d, a, b, columns, true, false});
}
inline uint32_t transpose_8x8(uint32_t pair) {
  const emulation::Exchange<uint32_t> all(pair);
  const unsigned g = emulation::current % 32 / 4, t = emulation::current % 4;
  const auto element = [&](unsigned row) {
    return all.of(4 * row + g / 2) >> (16 * (g % 2)) & 0xFFFFu;
  };
  return element(2 * t) | element(2 * t + 1) << 16;
}

#endif
