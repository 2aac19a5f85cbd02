// The state of a head in registers: a warp holds 8 columns, a lane a quarter of one.
#pragma once

#include "../../_device/ptx.cuh"
#include "config.cuh"

constexpr int kKeyWidth = Config::kKeyWidth, kValueWidth = Config::kValueWidth;
constexpr int kColumns = 8, kGroups = 4;  // of a warp, and of lanes that share a column
constexpr int kWarps = kValueWidth / kColumns, kThreads = 32 * kWarps;
constexpr int kLaneRows = kKeyWidth / kGroups;
// Four groups of lanes then read four different banks of a key.
constexpr int kGroupStride = kLaneRows + 4, kKeyStride = kGroups * kGroupStride;

// A lane's quarter of a column of the state.
struct Column {
  float s[kLaneRows];

  __device__ __forceinline__ void load(const float* from) {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) s[i] = load_l2_float(from + i * kValueWidth);
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) s[i] = 0.0f;
  }
  __device__ __forceinline__ void store(float* to) const {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) to[i * kValueWidth] = s[i];
  }

  static __device__ __forceinline__ float decayed(float s, float decay) {
    return __fmul_rn(s, decay);
  }
  static __device__ __forceinline__ float added(float s, float key, float change) {
    return __fmaf_rn(key, change, s);
  }

  // The sum over all rows of a column of terms(row, key) by lanes' rows, lanes by halving.
  template <class Term>
  __device__ __forceinline__ float dot(const float* key, Term term) {
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kLaneRows; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(key + i);
      sums[0] = __fmaf_rn(term(i), four.x, sums[0]);
      sums[1] = __fmaf_rn(term(i + 1), four.y, sums[1]);
      sums[2] = __fmaf_rn(term(i + 2), four.z, sums[2]);
      sums[3] = __fmaf_rn(term(i + 3), four.w, sums[3]);
    }
    float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    sum += __shfl_xor_sync(kAllLanes, sum, kColumns);
    return sum + __shfl_xor_sync(kAllLanes, sum, 2 * kColumns);
  }

  __device__ __forceinline__ void add(const float* key, float change) {
#pragma unroll
    for (int i = 0; i < kLaneRows; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(key + i);
      s[i] = added(s[i], four.x, change);
      s[i + 1] = added(s[i + 1], four.y, change);
      s[i + 2] = added(s[i + 2], four.z, change);
      s[i + 3] = added(s[i + 3], four.w, change);
    }
  }

  __device__ __forceinline__ void decay_by(float decay) {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) s[i] = decayed(s[i], decay);
  }

  // A row that was computed before.
  __device__ __forceinline__ void replay(const float* key, float decay, float change) {
    decay_by(decay);
    add(key, change);
  }

  // A new row: its output, and δ in `change`.
  __device__ __forceinline__ float advance(const float* query, const float* key, float value,
                                           float decay, float beta, float& change) {
    decay_by(decay);
    const float kept = dot(key, [&](int i) { return s[i]; });
    change = __fmul_rn(value - kept, beta);
    add(key, change);
    return dot(query, [&](int i) { return s[i]; });
  }
};
