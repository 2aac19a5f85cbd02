// Helpers of both launches of HeadScreen: bounds of scores in unsigned order, and ranked keys.
#pragma once

#include "../../_device/final_logit.cuh"
#include "../../_device/head_stream.cuh"
#include "../../_device/infinity.cuh"
#include "../../_device/ordered_key.cuh"
#include "../../_device/row_sampling.cuh"

// Return the maximum over the lanes with other tokens of the same row: lanes 4·g + t of one t.
__device__ __forceinline__ float max_over_tokens(float value) {
#pragma unroll
  for (int mask = 4; mask < 32; mask *= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, mask));
  }
  return value;
}

__device__ __forceinline__ uint64_t max_over_tokens(uint64_t key) {
#pragma unroll
  for (int mask = 4; mask < 32; mask *= 2) {
    const uint64_t other = __shfl_xor_sync(kAllLanes, key, mask);
    key = key < other ? other : key;
  }
  return key;
}
