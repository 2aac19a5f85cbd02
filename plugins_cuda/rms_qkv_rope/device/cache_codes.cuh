// Quantization of keys and values for fp8 caches (kv_write/codes.py).
#pragma once

#include "../../_device/e4m3.cuh"

// Quantize two values to the lower 16 bits; zeros have no sign.
__device__ __forceinline__ uint32_t cache_codes(float low, float high) {
  const uint32_t pair = pack_e4m3x2(low, high);
  return pair & (((pair & 0x7Fu) != 0 ? 0xFFu : 0u) | ((pair & 0x7F00u) != 0 ? 0xFF00u : 0u));
}

// Quantize eight bf16 values.
__device__ __forceinline__ uint2 cache_codes(uint4 values) {
  const auto pair = [](uint32_t two) {
    return cache_codes(bf16_low_to_float(two), bf16_high_to_float(two));
  };
  return make_uint2(pair(values.y) << 16 | pair(values.x), pair(values.w) << 16 | pair(values.z));
}
