// Arithmetic of bf16 pairs, rounded once per operation; some operands are one half of a pair.
#pragma once

#include "bf16.cuh"
#include "types.cuh"

#ifdef SPECBUILD_EMULATE

template <int half>
__device__ inline uint32_t mul_bf16x2_by_half(uint32_t a, uint32_t b) {
  const uint32_t factor = half ? b >> 16 : b & 0xFFFFu;
  return mul_bf16x2(a, factor << 16 | factor);
}

// Convert a sum to a float that rounds to the same bf16: round to odd if it is inexact.
inline float float_to_odd(double sum) {
  const float nearest = static_cast<float>(sum);
  const double error = sum - static_cast<double>(nearest);
  uint32_t bits = __float_as_uint(nearest);
  if (error == 0.0 || bits % 2 != 0) return nearest;
  const bool away = (error > 0.0) == (nearest > 0.0);
  return __uint_as_float(away ? bits + 1 : bits - 1);
}

inline uint32_t add_bf16x2(uint32_t a, uint32_t b) {
  const auto sum = [](float x, float y) { return float_to_odd(static_cast<double>(x) + y); };
  return pack_bf16x2(sum(bf16_low_to_float(a), bf16_low_to_float(b)),
                     sum(bf16_high_to_float(a), bf16_high_to_float(b)));
}

template <int half>
__device__ inline uint32_t fma_bf16x2_by_half(uint32_t a, uint32_t b, uint32_t c) {
  const double factor = half ? bf16_high_to_float(b) : bf16_low_to_float(b);
  return pack_bf16x2(float_to_odd(bf16_low_to_float(a) * factor + bf16_low_to_float(c)),
                     float_to_odd(bf16_high_to_float(a) * factor + bf16_high_to_float(c)));
}

template <int half>
__device__ inline uint32_t fma_bf16x2_by_halves(uint32_t a, uint32_t b, uint32_t c) {
  const uint32_t addend = half ? c >> 16 : c & 0xFFFFu;
  return fma_bf16x2_by_half<half>(a, b, addend << 16 | addend);
}

#else

// Written so that ptxas encodes the half in the operand, without an extra instruction.
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

__device__ __forceinline__ uint32_t add_bf16x2(uint32_t a, uint32_t b) {
  uint32_t sum;
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}

// a times one half of b, plus c.
template <int half>
__device__ __forceinline__ uint32_t fma_bf16x2_by_half(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t sum;
  if constexpr (half == 0) {
    asm("{\n.reg .b16 low, high;\n.reg .b32 both;\nmov.b32 {low, high}, %2;\n"
        "mov.b32 both, {low, low};\nfma.rn.bf16x2 %0, %1, both, %3;\n}"
        : "=r"(sum)
        : "r"(a), "r"(b), "r"(c));
  } else {
    asm("{\n.reg .b16 low, high;\n.reg .b32 both;\nmov.b32 {low, high}, %2;\n"
        "mov.b32 both, {high, high};\nfma.rn.bf16x2 %0, %1, both, %3;\n}"
        : "=r"(sum)
        : "r"(a), "r"(b), "r"(c));
  }
  return sum;
}

// a times one half of b, plus the same half of c.
template <int half>
__device__ __forceinline__ uint32_t fma_bf16x2_by_halves(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t sum;
  if constexpr (half == 0) {
    asm("{\n.reg .b16 low, high, low_c, high_c;\n.reg .b32 both, both_c;\n"
        "mov.b32 {low, high}, %2;\nmov.b32 both, {low, low};\n"
        "mov.b32 {low_c, high_c}, %3;\nmov.b32 both_c, {low_c, low_c};\n"
        "fma.rn.bf16x2 %0, %1, both, both_c;\n}"
        : "=r"(sum)
        : "r"(a), "r"(b), "r"(c));
  } else {
    asm("{\n.reg .b16 low, high, low_c, high_c;\n.reg .b32 both, both_c;\n"
        "mov.b32 {low, high}, %2;\nmov.b32 both, {high, high};\n"
        "mov.b32 {low_c, high_c}, %3;\nmov.b32 both_c, {high_c, high_c};\n"
        "fma.rn.bf16x2 %0, %1, both, both_c;\n}"
        : "=r"(sum)
        : "r"(a), "r"(b), "r"(c));
  }
  return sum;
}

#endif
