// Online softmax: its state (maximum, sum, weighted values), updates, and the merge of states.
//
// Every product that is added is an explicit fma, so the bits do not depend on where the code is
// inlined.
#pragma once

#include "bf16.cuh"
#include "ptx_attention.cuh"

constexpr float kLog2E = 1.4426950408889634f;

// The maximum of no scores.
__device__ __forceinline__ float no_maximum() {
  return __uint_as_float(0xFF800000u);
}

// The maximum to subtract in exponents: finite even if no key was visible.
__device__ __forceinline__ float finite_maximum(float maximum) {
  return maximum == no_maximum() ? 0.0f : maximum;
}

// The softmax state of some keys, for one head and four columns; ``maximum`` is in units of log 2.
struct Part {
  float maximum, sum;
  float4 values;
};

__device__ __forceinline__ Part empty_part() {
  return {no_maximum(), 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
}

// Merge the maximum and sum of ``part`` into ``all``, and return the factors of the values: `a` for
// those of ``all``, `b` for those of the part. Return false if the part had no visible key; it then
// changes nothing.
__device__ __forceinline__ bool join_sums(float& all_maximum, float& all_sum, float part_maximum,
                                          float part_sum, float& a, float& b) {
  if (part_maximum == no_maximum()) return false;
  const float maximum = fmaxf(all_maximum, part_maximum);
  a = exp2_fast(all_maximum - maximum), b = exp2_fast(part_maximum - maximum);
  all_maximum = maximum;
  all_sum = __fmaf_rn(part_sum, b, __fmul_rn(all_sum, a));
  return true;
}

// Merge a part into ``all``. The code has no branches, so that the exponents of consecutive parts
// are computed independently.
__device__ __forceinline__ void join(Part& all, const Part& part) {
  const bool seen = part.maximum != no_maximum();
  const float maximum = fmaxf(all.maximum, part.maximum);
  const float a = exp2_fast(all.maximum - maximum), b = exp2_fast(part.maximum - maximum);
  const auto joined = [&](float before, float added) {
    const float both = __fmaf_rn(added, b, __fmul_rn(before, a));
    return seen ? both : before;
  };
  all.maximum = maximum;
  all.sum = joined(all.sum, part.sum);
  all.values.x = joined(all.values.x, part.values.x);
  all.values.y = joined(all.values.y, part.values.y);
  all.values.z = joined(all.values.z, part.values.z);
  all.values.w = joined(all.values.w, part.values.w);
}

// Merge a sink: a key without a value contributes to the maximum and the sum.
__device__ __forceinline__ void join_sink(Part& all, float sink) {
  const float logit = sink * kLog2E;
  const float maximum = fmaxf(all.maximum, logit);
  const float a = exp2_fast(all.maximum - maximum);
  all.maximum = maximum;
  all.sum = __fmaf_rn(all.sum, a, exp2_fast(logit - maximum));
  all.values.x *= a, all.values.y *= a, all.values.z *= a, all.values.w *= a;
}

// Return the weighted mean as four bf16; zeros if no key was visible.
__device__ __forceinline__ uint2 mean_of(const Part& all) {
  const float scale = all.sum > 0.0f ? 1.0f / all.sum : 0.0f;
  return make_uint2(pack_bf16x2(all.values.x * scale, all.values.y * scale),
                    pack_bf16x2(all.values.z * scale, all.values.w * scale));
}

// Convert the scores of 32 keys in this lane, by 8 keys [4][two of row 0, two of row 1], to the
// weights of row j. `maximum` is that of the scores before `scale`, which includes log 2; `sum` is
// that of this lane. Return the factor for the values so far. A row without a visible key is not
// changed.
__device__ __forceinline__ float weigh_tile(float (*score)[4], int j, float scale, float& maximum,
                                            float& sum) {
  float top = maximum;
#pragma unroll
  for (int n = 0; n < 4; ++n) top = fmaxf(top, fmaxf(score[n][2 * j], score[n][2 * j + 1]));
  top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
  top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
  const float base = finite_maximum(top);
  const float rescale = exp2_fast(__fmul_rn(maximum - base, scale));
  const float shift = -__fmul_rn(base, scale);
  maximum = top;
  float pair[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    float& low = score[n][2 * j];
    float& high = score[n][2 * j + 1];
    low = exp2_fast(__fmaf_rn(low, scale, shift));
    high = exp2_fast(__fmaf_rn(high, scale, shift));
    pair[n] = low + high;
  }
  sum = __fmaf_rn(sum, rescale, (pair[0] + pair[1]) + (pair[2] + pair[3]));
  return rescale;
}
