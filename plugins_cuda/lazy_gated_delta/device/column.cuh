// The state of a head in registers: a warp has 8 columns, a lane 4 of them and a 16th of the rows.
#pragma once

#include "../../_device/ptx.cuh"
#include "config.cuh"

constexpr int kKeyWidth = Config::kKeyWidth, kValueWidth = Config::kValueWidth;
constexpr int kColumns = 8, kLaneColumns = 4;  // of a warp, of a lane
constexpr int kGroups = 16;                    // of lanes, which split the rows
constexpr int kLaneRows = kKeyWidth / kGroups;
constexpr int kWarps = kValueWidth / kColumns, kThreads = 32 * kWarps;

// A lane's part of a key or a query.
struct LaneVector {
  float of[kLaneRows];

  __device__ __forceinline__ explicit LaneVector(const float* from) {
    if constexpr (kLaneRows % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kLaneRows; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(from + i);
        of[i] = four.x, of[i + 1] = four.y, of[i + 2] = four.z, of[i + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i) of[i] = from[i];
    }
  }
};

// Lane l of 32 has columns from 4 · (l % 2) on, and rows from kLaneRows · (l / 2) on.
struct LaneState {
  float4 s[kLaneRows];

  __device__ __forceinline__ void load(const float* from) {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      const uint4 bits = load_l2_16(from + i * kValueWidth);
      s[i] = make_float4(__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z),
                         __uint_as_float(bits.w));
    }
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) s[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  __device__ __forceinline__ void store(float* to) const {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) *reinterpret_cast<float4*>(to + i * kValueWidth) = s[i];
  }

  // The two operations that change a state, for rows and for their replays.
  __device__ __forceinline__ void decay_by(float decay) {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      s[i] = make_float4(__fmul_rn(s[i].x, decay), __fmul_rn(s[i].y, decay),
                         __fmul_rn(s[i].z, decay), __fmul_rn(s[i].w, decay));
    }
  }
  __device__ __forceinline__ void add(const LaneVector& key, float4 change) {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      s[i].x = __fmaf_rn(key.of[i], change.x, s[i].x);
      s[i].y = __fmaf_rn(key.of[i], change.y, s[i].y);
      s[i].z = __fmaf_rn(key.of[i], change.z, s[i].z);
      s[i].w = __fmaf_rn(key.of[i], change.w, s[i].w);
    }
  }

  // Return the sum over all rows of one of the lane's columns, own_column(): over a lane's rows in
  // order, then over lanes by butterfly.
  __device__ __forceinline__ float dot(const LaneVector& by) const {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      sum.x = __fmaf_rn(s[i].x, by.of[i], sum.x);
      sum.y = __fmaf_rn(s[i].y, by.of[i], sum.y);
      sum.z = __fmaf_rn(s[i].z, by.of[i], sum.z);
      sum.w = __fmaf_rn(s[i].w, by.of[i], sum.w);
    }
    // A lane keeps two columns and passes two to another lane, then one of each.
    const int lane = threadIdx.x % 32;
    const bool upper = (lane & 2) != 0, odd = (lane & 4) != 0;
    const float first =
        (upper ? sum.z : sum.x) + __shfl_xor_sync(kAllLanes, upper ? sum.x : sum.z, 2);
    const float second =
        (upper ? sum.w : sum.y) + __shfl_xor_sync(kAllLanes, upper ? sum.y : sum.w, 2);
    float total = (odd ? second : first) + __shfl_xor_sync(kAllLanes, odd ? first : second, 4);
    total += __shfl_xor_sync(kAllLanes, total, 8);
    return total + __shfl_xor_sync(kAllLanes, total, 16);
  }

  // The column of the lane that dot() returns.
  static __device__ __forceinline__ int own_column(int lane) {
    return (lane & 2) + ((lane & 4) >> 2);
  }

  // Return all four columns of a lane, from the lanes that have them.
  static __device__ __forceinline__ float4 of_columns(float own) {
    const int lane = threadIdx.x % 32 & ~6;
    return make_float4(__shfl_sync(kAllLanes, own, lane), __shfl_sync(kAllLanes, own, lane | 4),
                       __shfl_sync(kAllLanes, own, lane | 2),
                       __shfl_sync(kAllLanes, own, lane | 6));
  }

  // Apply a row that was computed before.
  __device__ __forceinline__ void replay(const LaneVector& key, float decay, float4 change) {
    decay_by(decay);
    add(key, change);
  }

  // Apply a new row: return the output of the lane's column; `change` receives its δ.
  __device__ __forceinline__ float advance(const float* query, const LaneVector& key, float value,
                                           float decay, float beta, float& change) {
    decay_by(decay);
    change = __fmul_rn(value - dot(key), beta);
    add(key, of_columns(change));
    return dot(LaneVector(query));
  }
};
