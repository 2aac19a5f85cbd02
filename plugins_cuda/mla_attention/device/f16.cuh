// Pairs of fp16 as bits, low half first: rounded to nearest even.
#pragma once

#include "../../_device/types.cuh"

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

#endif
