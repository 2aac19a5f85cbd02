// The part of a row's attention that is on values; the rest is on its sink.
//
// Config: HAS_SINKS.
#pragma once

#include "../../_device/attention_softmax.cuh"
#include "config.cuh"

// Return the sum of a row's weights after all splits were merged.
__device__ __forceinline__ float mass_of(const Part& all, const float* sinks, int head) {
  if (!Config::kHasSinks) return all.sum > 0.0f ? 1.0f : 0.0f;
  Part one{all.maximum, all.sum, make_float4(all.sum, 0.0f, 0.0f, 0.0f)};
  join_sink(one, sinks[head]);
  return one.sum > 0.0f ? one.values.x / one.sum : 0.0f;
}
