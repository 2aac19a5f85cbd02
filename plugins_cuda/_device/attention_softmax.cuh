// Online softmax: a state (maximum, sum, weighted values), its steps, and how states join.
//
// Every multiply that feeds an add is an explicit fma, so that the bits are the same wherever the
// code is inlined.
#pragma once

#include "bf16.cuh"
#include "ptx_attention.cuh"

constexpr float kLog2E = 1.4426950408889634f;

// The maximum over no key.
__device__ __forceinline__ float no_maximum() {
  return __uint_as_float(0xFF800000u);
}

// What stands for the maximum in exponents: finite where no key was seen yet.
__device__ __forceinline__ float finite_maximum(float maximum) {
  return maximum == no_maximum() ? 0.0f : maximum;
}

// Sums of a part of the keys, for one head and four columns: `maximum` in units of log 2.
struct Part {
  float maximum, sum;
  float4 values;
};

__device__ __forceinline__ Part empty_part() {
  return {no_maximum(), 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
}

// all ← all ∪ part. A part that has seen no key changes nothing.
__device__ __forceinline__ void join(Part& all, const Part& part) {
  if (part.maximum == no_maximum()) return;
  const float maximum = fmaxf(all.maximum, part.maximum);
  const float a = exp2_fast(all.maximum - maximum), b = exp2_fast(part.maximum - maximum);
  all.maximum = maximum;
  all.sum = __fmaf_rn(part.sum, b, __fmul_rn(all.sum, a));
  all.values.x = __fmaf_rn(part.values.x, b, __fmul_rn(all.values.x, a));
  all.values.y = __fmaf_rn(part.values.y, b, __fmul_rn(all.values.y, a));
  all.values.z = __fmaf_rn(part.values.z, b, __fmul_rn(all.values.z, a));
  all.values.w = __fmaf_rn(part.values.w, b, __fmul_rn(all.values.w, a));
}

// A sink joins as a key without a value: in the maximum and in the sum.
__device__ __forceinline__ void join_sink(Part& all, float sink) {
  const float logit = sink * kLog2E;
  const float maximum = fmaxf(all.maximum, logit);
  const float a = exp2_fast(all.maximum - maximum);
  all.maximum = maximum;
  all.sum = __fmaf_rn(all.sum, a, exp2_fast(logit - maximum));
  all.values.x *= a, all.values.y *= a, all.values.z *= a, all.values.w *= a;
}

// The weighted mean as four bf16; zeros where nothing was seen.
__device__ __forceinline__ uint2 mean_of(const Part& all) {
  const float scale = all.sum > 0.0f ? 1.0f / all.sum : 0.0f;
  return make_uint2(pack_bf16x2(all.values.x * scale, all.values.y * scale),
                    pack_bf16x2(all.values.z * scale, all.values.w * scale));
}
