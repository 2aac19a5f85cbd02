// f16 pairs, the low half first: conversions from fp32, bf16 and e4m3, and their mma.
#pragma once

#include "bf16.cuh"
#include "types.cuh"

// The largest number of f16.
constexpr float kLargestF16 = 65504.0f;

#ifdef SPECBUILD_EMULATE

inline uint32_t pack_f16x2(float low, float high) {
  const _Float16 pair[2] = {static_cast<_Float16>(low), static_cast<_Float16>(high)};
  uint32_t bits;
  std::memcpy(&bits, pair, sizeof(bits));
  return bits;
}

inline float2 unpack_f16x2(uint32_t bits) {
  _Float16 pair[2];
  std::memcpy(pair, &bits, sizeof(bits));
  return make_float2(static_cast<float>(pair[0]), static_cast<float>(pair[1]));
}

inline uint32_t sub_f16x2(uint32_t a, uint32_t b) {
  const float2 from = unpack_f16x2(a), by = unpack_f16x2(b);
  return pack_f16x2(from.x - by.x, from.y - by.y);
}

// Convert two e4m3 values in the lower 16 bits.
__device__ inline uint32_t e4m3x2_to_f16x2(uint32_t pair) {
  const auto value = [](uint32_t code) {
    const uint32_t exponent = code >> 3 & 15u, fraction = code & 7u;
    if ((code & 0x7Fu) == 0x7Fu) return __uint_as_float(0x7FC00000u);
    const float magnitude = exponent == 0
                                ? fraction * 0.001953125f
                                : __uint_as_float((exponent + 120u) << 23 | fraction << 20);
    return code & 0x80u ? -magnitude : magnitude;
  };
  return pack_f16x2(value(pair & 0xFFu), value(pair >> 8 & 0xFFu));
}

#else

__device__ __forceinline__ uint32_t pack_f16x2(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ float2 unpack_f16x2(uint32_t bits) {
  float2 pair;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.f32.f16 %0, low;\n"
      "cvt.f32.f16 %1, high;\n"
      "}\n"
      : "=f"(pair.x), "=f"(pair.y)
      : "r"(bits));
  return pair;
}

__device__ __forceinline__ uint32_t sub_f16x2(uint32_t a, uint32_t b) {
  uint32_t difference;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
  return difference;
}

// Convert two e4m3 values in the lower 16 bits, exactly.
__device__ __forceinline__ uint32_t e4m3x2_to_f16x2(uint32_t pair) {
  uint32_t values;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(values) : "h"(static_cast<uint16_t>(pair)));
  return values;
}

// mma_bf16() for f16 operands.
__device__ __forceinline__ void mma_f16(float (&d)[4], const uint32_t (&a)[4],
                                        const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#endif

// Convert a bf16 pair, clamped to the range of f16; below 2^−14 the spacing is 2^−24.
__device__ __forceinline__ uint32_t bf16x2_to_f16x2(uint32_t pair) {
  const auto bounded = [](float value) { return fminf(fmaxf(value, -kLargestF16), kLargestF16); };
  return pack_f16x2(bounded(bf16_low_to_float(pair)), bounded(bf16_high_to_float(pair)));
}
