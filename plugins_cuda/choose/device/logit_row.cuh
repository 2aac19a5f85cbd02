// A row of logits as CTAs of kEdgeThreads read it, and what they are after temperature.
#pragma once

#include "../../_device/infinity.cuh"
#include "../../_device/ptx.cuh"
#include "value_edge.cuh"

constexpr int kBatch = 4;  // 16-byte loads under way, a thread
constexpr int kPartLogits = kBatch * kEdgeThreads * 4;
constexpr float kLog2E = 1.44269504f;
// Distances to the maximum in eighths of a nat; what lies 32 nats or more below it shares a bucket,
// which has no mass: less than 2⁻²⁴ of the whole in any vocabulary.
constexpr float kBucketsPerNat = 8.0f, kFarNats = 32.0f;
constexpr int kFarBucket = kEdgeDigits - 1;

// A row of logits, or the groups [begin, end) of it: four consecutive tokens each; past the
// vocabulary −∞, and so is what is less than ``least``.
struct Row {
  const float* logits;
  int vocab, begin, end;
  float least = minus_infinity();

  __device__ __forceinline__ Row(const float* logits, int vocab)
      : logits(logits), vocab(vocab), begin(0), end(ceil_div(vocab, 4)) {}

  // Drops what lies below the largest logit by more than a negative ``floor``.
  __device__ __forceinline__ void drop(float most, float floor) {
    if (floor < 0.0f) least = most + floor;
  }

  // A part of kPartLogits tokens.
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
    for (int c = 0; c < 4; ++c) x[c] = x[c] < least ? minus_infinity() : x[c];
  }
};

// Logits after temperature, and how far below the largest they are.
struct Scaled {
  float temperature, inverse, most_raw, most, slack;

  __device__ Scaled(float temperature, float most_raw)
      : temperature(temperature),
        inverse(1.0f / temperature),
        most_raw(most_raw),
        most(most_raw / temperature),
        slack(1e-5f * fabsf(most)) {}

  __device__ __forceinline__ float of(float raw) const {
    return raw / temperature;
  }

  // Bounds of the distance, for what is cheap to rule out; cover the rounding of ``of``.
  __device__ __forceinline__ float estimate(float raw) const {
    return (most_raw - raw) * inverse;
  }
  __device__ __forceinline__ bool beyond(float estimate, float nats) const {
    return estimate * 0.99998f > nats + slack;
  }
  __device__ __forceinline__ bool within(float estimate, float nats) const {
    return estimate * 1.00002f < nats - slack;
  }

  __device__ __forceinline__ int bucket(float scaled) const {
    return static_cast<int>(fminf((most - scaled) * kBucketsPerNat, kFarBucket));
  }

  // exp(scaled − top of its bucket) as a whole number below 2 · ``unit``.
  __device__ __forceinline__ uint32_t mass(float scaled, int bucket, float unit) const {
    if (bucket == kFarBucket) return 0;
    const float below = bucket / kBucketsPerNat - (most - scaled);
    return static_cast<uint32_t>(exp2_fast(below * kLog2E) * unit + 0.5f);
  }
};
