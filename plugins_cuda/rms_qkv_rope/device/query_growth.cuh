// The factor of queries by position, which is stored after the cosines.
#pragma once

#include "../../_device/bf16.cuh"
#include "../../_device/ptx_load.cuh"
#include "config.cuh"

__device__ __forceinline__ float growth_at(const float* cos, int position) {
  return load_constant_float(cos + static_cast<int64_t>(Config::kGrowth) * (Config::kHeadDim / 2) +
                             position);
}

// Multiply eight rounded queries by the factor, and round again.
__device__ __forceinline__ uint4 grown(uint4 values, float factor) {
  const auto pair = [&](uint32_t two) {
    return pack_bf16x2(bf16_low_to_float(two) * factor, bf16_high_to_float(two) * factor);
  };
  return make_uint4(pair(values.x), pair(values.y), pair(values.z), pair(values.w));
}
