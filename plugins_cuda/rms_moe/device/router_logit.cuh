// The logit of a router, rounded if the output of its layer is bf16 (kRounded).
#pragma once

#include "../../_device/bf16.cuh"
#include "config.cuh"

__device__ __forceinline__ float router_logit(float exact) {
  return Config::kRounded ? bf16_to_float(float_to_bf16(exact)) : exact;
}
