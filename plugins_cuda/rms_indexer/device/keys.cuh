// What a key is cached as: KEY_BYTES 2 for bf16, 1 for fp8 (e4m3).
#pragma once

#include "../../_device/e4m3.cuh"

#if KEY_BYTES == 1
using KeyElement = uint8_t;
#else
using KeyElement = uint16_t;
#endif

// Two bf16 as two elements, the first in the lower bits.
__device__ __forceinline__ uint32_t as_keys(uint32_t pair) {
#if KEY_BYTES == 1
  return pack_e4m3x2(bf16_low_to_float(pair), bf16_high_to_float(pair));
#else
  return pair;
#endif
}
