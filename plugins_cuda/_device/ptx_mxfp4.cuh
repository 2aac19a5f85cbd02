// A multiplication of bf16 pairs by one half of another pair.
#pragma once

#include "bf16.cuh"
#include "types.cuh"

#ifdef SPECBUILD_EMULATE

template <int half>
__device__ inline uint32_t mul_bf16x2_by_half(uint32_t a, uint32_t b) {
  const uint32_t factor = half ? b >> 16 : b & 0xFFFFu;
  return mul_bf16x2(a, factor << 16 | factor);
}

#else

// Spelled so that ptxas takes the half as an operand's form, without an instruction for it.
template <int half>
__device__ __forceinline__ uint32_t mul_bf16x2_by_half(uint32_t a, uint32_t b) {
  uint32_t product;
  if constexpr (half == 0) {
    asm("{\n.reg .b16 low, high;\n.reg .b32 both;\nmov.b32 {low, high}, %2;\n"
        "mov.b32 both, {low, low};\nmul.bf16x2 %0, %1, both;\n}"
        : "=r"(product)
        : "r"(a), "r"(b));
  } else {
    asm("{\n.reg .b16 low, high;\n.reg .b32 both;\nmov.b32 {low, high}, %2;\n"
        "mov.b32 both, {high, high};\nmul.bf16x2 %0, %1, both;\n}"
        : "=r"(product)
        : "r"(a), "r"(b));
  }
  return product;
}

#endif
