// How much of a row's attention over latents falls on values, its sink being the rest.
//
// Config: HAS_SINKS.
#pragma once

#include "../../_device/attention_softmax.cuh"
#include "config.cuh"

// The sum of a row's weights, of one that all slots have joined.
__device__ __forceinline__ float mass_of(const Part& all, const float* sinks, int head) {
  if (!Config::kHasSinks) return all.sum > 0.0f ? 1.0f : 0.0f;
  Part one{all.maximum, all.sum, make_float4(all.sum, 0.0f, 0.0f, 0.0f)};
  join_sink(one, sinks[head]);
  return one.sum > 0.0f ? one.values.x / one.sum : 0.0f;
}
