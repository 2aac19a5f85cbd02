// A row of logits, as CTAs of kEdgeThreads read it, and its values after temperature.
#pragma once

#include "../../_device/infinity.cuh"
#include "../../_device/ptx.cuh"
#include "value_edge.cuh"

constexpr int kBatch = 4;  // 16-byte loads of a thread in flight
constexpr int kPartLogits = kBatch * kEdgeThreads * 4;
constexpr float kLog2E = 1.44269504f;
// Distances to the maximum in eighths of a nat. Logits that are 32 nats or more below it share a
// bucket without mass: they have less than 2⁻²⁴ of the total in any vocabulary.
constexpr float kBucketsPerNat = 8.0f, kFarNats = 32.0f;
constexpr int kFarBucket = kEdgeDigits - 1;

// A row of logits, or its groups [begin, end) of four consecutive tokens. Entries past the
// vocabulary and those below ``threshold`` are −∞.
struct Row {
  const float* logits;
  int vocab, begin, end;
  float threshold = minus_infinity();

  __device__ __forceinline__ Row(const float* logits, int vocab)
      : logits(logits), vocab(vocab), begin(0), end(ceil_div(vocab, 4)) {}

  // Drop logits that are below the largest by more than −``floor``, if ``floor`` is negative.
  __device__ __forceinline__ void drop(float maximum, float floor) {
    if (floor < 0.0f) threshold = maximum + floor;
  }

  // Return a part of kPartLogits tokens.
  __device__ __forceinline__ Row part(int index) const {
    Row some = *this;
    some.begin = index * (kPartLogits / 4);
    some.end = min(end, some.begin + kPartLogits / 4);
    return some;
  }

  template <typename Visit>
  __device__ __forceinline__ void each_group(const Visit& visit) const {
    const int groups = end;
    const bool aligned = vocab % 4 == 0;
    for (int first = begin + threadIdx.x; first < groups; first += kBatch * kEdgeThreads) {
      float x[kBatch][4];
#pragma unroll
      for (int n = 0; n < kBatch; ++n) {
        const int group = first + n * kEdgeThreads;
        if (group < groups) load(group, aligned, x[n]);
      }
#pragma unroll
      for (int n = 0; n < kBatch; ++n) {
        const int group = first + n * kEdgeThreads;
        if (group < groups) visit(group, x[n]);
      }
    }
  }

 private:
  __device__ __forceinline__ void load(int group, bool aligned, float (&x)[4]) const {
    if (aligned) {
      const uint4 four = load_l2_16(logits + 4 * group);
      x[0] = __uint_as_float(four.x);
      x[1] = __uint_as_float(four.y);
      x[2] = __uint_as_float(four.z);
      x[3] = __uint_as_float(four.w);
    } else {
      for (int c = 0; c < 4; ++c) {
        x[c] = 4 * group + c < vocab ? load_l2_float(logits + 4 * group + c) : minus_infinity();
      }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) x[c] = x[c] < threshold ? minus_infinity() : x[c];
  }
};

// Logits after temperature, and their distance to the largest.
struct Scaled {
  float temperature, inverse, maximum_raw, maximum, slack;

  __device__ Scaled(float temperature, float maximum_raw)
      : temperature(temperature),
        inverse(1.0f / temperature),
        maximum_raw(maximum_raw),
        maximum(maximum_raw / temperature),
        slack(1e-5f * fabsf(maximum)) {}

  __device__ __forceinline__ float of(float raw) const {
    return raw / temperature;
  }

  // Cheap bounds of the distance, which cover the rounding of ``of``.
  __device__ __forceinline__ float estimate(float raw) const {
    return (maximum_raw - raw) * inverse;
  }
  __device__ __forceinline__ bool beyond(float estimate, float nats) const {
    return estimate * 0.99998f > nats + slack;
  }
  __device__ __forceinline__ bool within(float estimate, float nats) const {
    return estimate * 1.00002f < nats - slack;
  }

  __device__ __forceinline__ int bucket(float scaled) const {
    return static_cast<int>(fminf((maximum - scaled) * kBucketsPerNat, kFarBucket));
  }

  // exp(scaled − top of its bucket) as an integer below 2 · ``unit``.
  __device__ __forceinline__ uint32_t mass(float scaled, int bucket, float unit) const {
    if (bucket == kFarBucket) return 0;
    const float below = bucket / kBucketsPerNat - (maximum - scaled);
    return static_cast<uint32_t>(exp2_fast(below * kLog2E) * unit + 0.5f);
  }
};
