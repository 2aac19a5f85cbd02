// What the two launches of HeadScreen share: bounds of scores in unsigned order, and ranked keys.
#pragma once

#include "../../_device/final_logit.cuh"
#include "../../_device/head_stream.cuh"
#include "../../_device/infinity.cuh"
#include "../../_device/ordered_key.cuh"
#include "../../_device/row_sampling.cuh"

// The largest over the lanes that hold other tokens of the same row: lanes 4·g + t of one t.
__device__ __forceinline__ float most_of_tokens(float value) {
#pragma unroll
  for (int mask = 4; mask < 32; mask *= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, mask));
  }
  return value;
}

__device__ __forceinline__ uint64_t most_of_tokens(uint64_t key) {
#pragma unroll
  for (int mask = 4; mask < 32; mask *= 2) {
    const uint64_t other = __shfl_xor_sync(kAllLanes, key, mask);
    key = key < other ? other : key;
  }
  return key;
}
