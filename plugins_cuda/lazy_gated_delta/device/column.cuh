// The state of a head in registers: a warp has 8 columns, a lane 4 of them and a 16th of the rows.
// With two CTAs per multiprocessor, a warp has 16 columns, and a lane an 8th of the rows. Both
// variants add in the same order: over 16 runs of rows, then over runs by butterfly.
#pragma once

#include "../../_device/ptx.cuh"
#include "inputs.cuh"

constexpr int kLaneColumns = 4;
constexpr int kRuns = 16, kRunRows = kKeyWidth / kRuns;  // of rows, summed in order
constexpr int kGroups = Config::kGroups;                 // of lanes, which split the rows
constexpr int kColumns = 32 / kGroups * kLaneColumns;    // of a warp
constexpr int kShift = kGroups == kRuns ? 0 : 1;         // of the bits of a lane
constexpr int kLaneRuns = kRuns / kGroups, kLaneRows = kLaneRuns * kRunRows;
static_assert(kLaneRuns == 1 || kLaneRuns == 2, "one run, or the sum of two");
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

// The first of a lane's columns among those of its warp, and the first of its rows.
__device__ __forceinline__ int column_of_lane() {
  return threadIdx.x % (2 << kShift) * kLaneColumns;
}
__device__ __forceinline__ int row_of_lane() {
  return threadIdx.x % 32 / (2 << kShift) * kLaneRows;
}

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

  // Return the sum over all rows of one of the lane's columns, own_column(): over a run's rows in
  // order, then over runs by butterfly.
  __device__ __forceinline__ float dot(const LaneVector& by) const {
    float4 sum = run_of(by, 0);
    if constexpr (kLaneRuns == 2) {
      const float4 other = run_of(by, kRunRows);
      sum = make_float4(sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w);
    }
    // A lane keeps two columns and passes two to another lane, then one of each.
    constexpr int two = 2 << kShift, one = 4 << kShift;
    const int lane = threadIdx.x % 32;
    const bool upper = (lane & two) != 0, odd = (lane & one) != 0;
    const float first =
        (upper ? sum.z : sum.x) + __shfl_xor_sync(kAllLanes, upper ? sum.x : sum.z, two);
    const float second =
        (upper ? sum.w : sum.y) + __shfl_xor_sync(kAllLanes, upper ? sum.y : sum.w, two);
    float total = (odd ? second : first) + __shfl_xor_sync(kAllLanes, odd ? first : second, one);
#pragma unroll
    for (int distance = 2 * one; distance < 32; distance *= 2)
      total += __shfl_xor_sync(kAllLanes, total, distance);
    return total;
  }

  // The column of the lane that dot() returns. The first lanes have each column of a warp once.
  static __device__ __forceinline__ int own_column() {
    const int bits = threadIdx.x % 32 >> kShift;
    return (bits & 2) + ((bits & 4) >> 2);
  }
  static __device__ __forceinline__ bool is_owner() {
    return threadIdx.x % 32 < kColumns;
  }

  // Return all four columns of a lane, from the lanes that have them.
  static __device__ __forceinline__ float4 of_columns(float own) {
    constexpr int two = 2 << kShift, one = 4 << kShift;
    const int lane = threadIdx.x % 32 & ~(one | two);
    return make_float4(__shfl_sync(kAllLanes, own, lane), __shfl_sync(kAllLanes, own, lane | one),
                       __shfl_sync(kAllLanes, own, lane | two),
                       __shfl_sync(kAllLanes, own, lane | one | two));
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

 private:
  __device__ __forceinline__ float4 run_of(const LaneVector& by, int first) const {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = first; i < first + kRunRows; ++i) {
      sum.x = __fmaf_rn(s[i].x, by.of[i], sum.x);
      sum.y = __fmaf_rn(s[i].y, by.of[i], sum.y);
      sum.z = __fmaf_rn(s[i].z, by.of[i], sum.z);
      sum.w = __fmaf_rn(s[i].w, by.of[i], sum.w);
    }
    return sum;
  }
};
