// Inputs of some routers only: a selection bias, a norm of the router's input, and factors of
// experts.
#pragma once

#include "../../_device/bf16.cuh"
#include "../../_device/types.cuh"

// Null where Config::kScores, kRouterNorm and kFactors are 0.
struct RouterParts {
  const float* choice_bias;
  const float* router_norm;
  const float* expert_scale;
};

// Eight bf16 values times ``rate`` and fp32 weights, rounded once.
__device__ __forceinline__ uint4 normed_by(uint4 v, float4 first, float4 second, float rate) {
  const auto pair = [rate](uint32_t x, float low, float high) {
    const float2 value = unpack_bf16x2(x);
    return pack_bf16x2(value.x * rate * low, value.y * rate * high);
  };
  return make_uint4(pair(v.x, first.x, first.y), pair(v.y, first.z, first.w),
                    pair(v.z, second.x, second.y), pair(v.w, second.z, second.w));
}
