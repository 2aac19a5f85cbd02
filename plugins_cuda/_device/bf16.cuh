// bf16 as bits: conversions with rounding to nearest even, of single values and of pairs (low half
// first).
#pragma once

#include "types.cuh"

__device__ __forceinline__ float bf16_to_float(uint16_t bits) {
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

__device__ __forceinline__ float bf16_low_to_float(uint32_t pair) {
  return __uint_as_float(pair << 16);
}

__device__ __forceinline__ float bf16_high_to_float(uint32_t pair) {
  return __uint_as_float(pair & 0xFFFF0000u);
}

__device__ __forceinline__ float2 unpack_bf16x2(uint32_t pair) {
  return make_float2(bf16_low_to_float(pair), bf16_high_to_float(pair));
}

#ifdef SPECBUILD_EMULATE

__device__ inline uint16_t float_to_bf16(float value) {
  uint32_t bits = __float_as_uint(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFFu;
  bits += 0x7FFFu + ((bits >> 16) & 1u);
  return static_cast<uint16_t>(bits >> 16);
}

__device__ inline uint32_t pack_bf16x2(float low, float high) {
  return static_cast<uint32_t>(float_to_bf16(low)) |
         (static_cast<uint32_t>(float_to_bf16(high)) << 16);
}

__device__ inline uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  return pack_bf16x2(bf16_low_to_float(a) * bf16_low_to_float(b),
                     bf16_high_to_float(a) * bf16_high_to_float(b));
}

#else

__device__ __forceinline__ uint16_t float_to_bf16(float value) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ uint32_t pack_bf16x2(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// It keeps subnormals, which hold the smallest MXFP4 magnitudes.
__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

#endif
