// log Σ exp of a stream of logits in parts: a maximum and a sum of exponentials below it.
#pragma once

#include "infinity.cuh"

struct LogSumExp {
  float maximum = minus_infinity(), sum = 0.0f;

  // A logit of −∞ adds nothing.
  __device__ __forceinline__ void raise(float to) {
    if (to > maximum) {
      sum *= expf(maximum - to);
      maximum = to;
    }
  }

  // ``value`` is at most the maximum.
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

// The parts of all lanes, in an order that depends on the lane numbers alone. Every lane gets it.
__device__ __forceinline__ LogSumExp warp_join(LogSumExp part) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const float maximum = __shfl_xor_sync(0xFFFFFFFFu, part.maximum, distance);
    const float sum = __shfl_xor_sync(0xFFFFFFFFu, part.sum, distance);
    // Both lanes of a pair must do the same arithmetic: the lower lane's part comes first.
    if (threadIdx.x & distance) {
      LogSumExp lower{maximum, sum};
      lower.join(part.maximum, part.sum);
      part = lower;
    } else {
      part.join(maximum, sum);
    }
  }
  return part;
}

// The same over a block of ``warps`` full warps; ``scratch`` holds as many parts. Every thread
// gets it.
__device__ __forceinline__ LogSumExp block_join(LogSumExp part, float2* scratch, int warps) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  part = warp_join(part);
  if (lane == 0) scratch[warp] = make_float2(part.maximum, part.sum);
  __syncthreads();
  LogSumExp total;
  if (lane < warps) total = LogSumExp{scratch[lane].x, scratch[lane].y};
  return warp_join(total);
}
