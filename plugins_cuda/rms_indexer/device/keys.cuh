// The type of cached keys: bf16, or fp8 (e4m3) if elements have one byte.
#pragma once

#include "../../_device/e4m3.cuh"
#include "config.cuh"

template <int bytes>
struct CachedKey {
  using Element = uint16_t;
};
template <>
struct CachedKey<1> {
  using Element = uint8_t;
};
using KeyElement = CachedKey<Config::kKeyBytes>::Element;

// Convert two bf16 to two elements, the first in the lower bits.
__device__ __forceinline__ uint32_t as_keys(uint32_t pair) {
  const bool fp8 = Config::kKeyBytes == 1;
  return fp8 ? pack_e4m3x2(bf16_low_to_float(pair), bf16_high_to_float(pair)) : pair;
}
