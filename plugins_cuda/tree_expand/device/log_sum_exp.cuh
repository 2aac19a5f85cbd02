// log Σ exp of logits that arrive in parts: a maximum, and a sum of exponentials relative to it.
#pragma once

#include "../../_device/infinity.cuh"

struct LogSumExp {
  float maximum = minus_infinity(), sum = 0.0f;

  // A logit of −∞ adds nothing.
  __device__ __forceinline__ void raise(float to) {
    if (to > maximum) {
      sum *= expf(maximum - to);
      maximum = to;
    }
  }

  // ``value`` is not above the maximum.
  __device__ __forceinline__ void add(float value) {
    sum += value == minus_infinity() ? 0.0f : expf(value - maximum);
  }

  __device__ __forceinline__ void join(float other_maximum, float other_sum) {
    raise(other_maximum);
    if (other_maximum != minus_infinity()) sum += other_sum * expf(other_maximum - maximum);
  }

  __device__ __forceinline__ float value() const {
    return maximum == minus_infinity() ? maximum : maximum + logf(sum);
  }
};

// Merge the parts of all lanes, in an order that depends on the lane indices only; every lane gets
// the result.
//
// At each of five levels the lower lane's part comes first, so both lanes of a pair compute
// lower.join(upper). All maxima are computed before the sums, so that the exponentials of all
// levels are independent.
__device__ __forceinline__ LogSumExp warp_join(LogSumExp part) {
  constexpr int kLevels = 5;
  float of_lower[kLevels], of_upper[kLevels];
  bool adds[kLevels];
#pragma unroll
  for (int level = 0; level < kLevels; ++level) {
    const int distance = 16 >> level;
    const float other = __shfl_xor_sync(kAllLanes, part.maximum, distance);
    const float lower = threadIdx.x & distance ? other : part.maximum;
    const float upper = threadIdx.x & distance ? part.maximum : other;
    part.maximum = upper > lower ? upper : lower;
    const float lowered = expf(lower - upper);
    of_lower[level] = upper > lower ? lowered : 1.0f;
    of_upper[level] = expf(upper - part.maximum);
    adds[level] = upper != minus_infinity();
  }
#pragma unroll
  for (int level = 0; level < kLevels; ++level) {
    const int distance = 16 >> level;
    const float other = __shfl_xor_sync(kAllLanes, part.sum, distance);
    const float lower = threadIdx.x & distance ? other : part.sum;
    const float upper = threadIdx.x & distance ? part.sum : other;
    const float kept = lower * of_lower[level], joined = kept + upper * of_upper[level];
    part.sum = adds[level] ? joined : kept;
  }
  return part;
}

// The same over a block of ``warps`` full warps; ``scratch`` holds that many parts. Every thread
// gets the result.
__device__ __forceinline__ LogSumExp block_join(LogSumExp part, float2* scratch, int warps) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  part = warp_join(part);
  if (lane == 0) scratch[warp] = make_float2(part.maximum, part.sum);
  __syncthreads();
  LogSumExp total;
  if (lane < warps) total = LogSumExp{scratch[lane].x, scratch[lane].y};
  return warp_join(total);
}
