// Conversions of fp8 e4m3 (four exponent bits with a bias of 7, three mantissa bits, no infinity).
// Values out of range become ±448.
#pragma once

#include "bf16.cuh"
#include "types.cuh"

#ifdef SPECBUILD_EMULATE

__device__ inline uint32_t float_to_e4m3(float value) {
  const uint32_t sign = __float_as_uint(value) >> 24 & 0x80u;
  if (value != value) return sign | 0x7Fu;
  const float magnitude = fminf(sign != 0 ? -value : value, 448.0f);
  // Below 2^−6 the spacing is 2^−9: adding 2^23 rounds multiples of it to integers.
  if (magnitude < 0.015625f) {
    return sign | static_cast<uint32_t>(magnitude * 512.0f + 8388608.0f - 8388608.0f);
  }
  const uint32_t bits = __float_as_uint(magnitude);
  return sign | ((bits + 0x7FFFFu + (bits >> 20 & 1u)) >> 20) - 120 * 8;
}

__device__ inline uint32_t pack_e4m3x2(float low, float high) {
  return float_to_e4m3(high) << 8 | float_to_e4m3(low);
}

#else

// Pack two values into the lower 16 bits, ``low`` in the lower byte.
__device__ __forceinline__ uint32_t pack_e4m3x2(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

#endif

// Convert two values in the lower 16 bits to a bf16 pair, exactly. Sign, exponent and mantissa move
// to their bits in a bf16, whose exponent bias is larger by 120. Subnormals remain subnormals until
// a multiplication corrects the bias.
__device__ __forceinline__ uint32_t e4m3x2_to_bf16x2(uint32_t pair) {
  const uint32_t spread = (pair << 8 & 0xFF00u) | (pair << 16 & 0xFF000000u);
  const uint32_t small = (spread & 0x80008000u) | (spread >> 4 & 0x07F007F0u);
  return mul_bf16x2(small, 0x7B807B80u);
}
