// The states of splits of heads wider than 128, and their merge in order.
//
// Config: kWidth, kGroup, kKvHeads, kSlots, kHasSinks, kWords.
#pragma once

#include "../../_device/attention_softmax.cuh"
#include "../../_device/bf16.cuh"
#include "../../_device/infinity.cuh"
#include "../../_device/l2_word.cuh"
#include "../../_device/ptx.cuh"
#include "config.cuh"

constexpr int kWidth = Config::kWidth;
constexpr int kWarps = 16, kThreads = 32 * kWarps;
constexpr int kParts = kWidth / 16 / kWarps;  // of 16 columns, of a warp
// Splits whose states are loaded at once, within the registers.
constexpr int kAhead = kParts == 1 && Config::kWords <= 2 ? 12 : 8;

static_assert(kAhead <= 32, "a lane computes the factors of a split");

// The maximum and the sum of merged splits; join_sums adds one.
struct Softmax {
  float maximum = minus_infinity(), sum = 0.0f;

  // Return two columns of the result, as bf16; ``sink`` is the address of the head's sink.
  __device__ __forceinline__ uint32_t result(float left, float right, const float* sink) const {
    float scale = 1.0f, total = sum;
    if (Config::kHasSinks != 0) {
      const float logit = load_l2_float(sink) * kLog2E, top = fmaxf(maximum, logit);
      scale = exp2_fast(maximum - top);
      total = __fmaf_rn(total, scale, exp2_fast(logit - top));
    }
    return pack_bf16x2(left * scale / total, right * scale / total);
  }
};

// The merged state of splits, for the lane's two rows g and g + 8 of the mma.
struct Joined {
  Softmax softmax[2];
  float of[kParts][2][4] = {};

  __device__ __forceinline__ void take(int half, float m, float l,
                                       const float (&values)[kParts][2][4]) {
    float own_scale, other_scale;
    if (!join_sums(softmax[half].maximum, softmax[half].sum, m, l, own_scale, other_scale)) return;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& at = of[part][i / 2][2 * half + i % 2];
        at =
            __fmaf_rn(values[part][i / 2][2 * half + i % 2], other_scale, __fmul_rn(at, own_scale));
      }
    }
  }
};

// The states of splits in the workspaces.
struct States {
  float2* sums;    // [rows, KV_HEADS, SLOTS, GROUP]: maximum and sum
  float2* values;  // [rows, KV_HEADS, SLOTS, GROUP, WIDTH / 2]

  static __device__ __forceinline__ int64_t place(int row, int kv_head, int split, int head) {
    return ((static_cast<int64_t>(row) * Config::kKvHeads + kv_head) * Config::kSlots + split) *
               Config::kGroup +
           head;
  }

  // Merge ``splits`` from ``first_split`` on: the part of CTA ``part`` of ``all``. A thread has two
  // columns at a time, a warp 64 of one head. Each lane computes the factors of one split; the code
  // is short, because a launch reads every instruction once.
  __device__ __forceinline__ void join(int first_row, int rows, int kv_head, int first_split,
                                       int splits, int part, int all, const float* sinks,
                                       uint16_t* attended) const {
    constexpr int kPairs = kWidth / 2;
    static_assert(kPairs % 32 == 0, "a warp's columns are of one head");
    const int end = first_split + splits, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
    for (int item = (warp * all + part) * 32 + lane; item < rows * Config::kGroup * kPairs;
         item += all * kThreads) {
      const int row = first_row + item / (Config::kGroup * kPairs);
      const int head = item / kPairs % Config::kGroup, pair = item % kPairs;
      Softmax softmax;
      float left = 0.0f, right = 0.0f;
#pragma unroll 1
      for (int split = first_split; split < end; split += kAhead) {
        const int64_t from = place(row, kv_head, split, head);
        float2 value[kAhead], own = make_float2(minus_infinity(), 0.0f);
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          if (split + i < end)
            value[i] = load_l2_float2(values + (from + i * Config::kGroup) * kPairs + pair);
        }
        if (lane < kAhead && split + lane < end)
          own = load_l2_float2(sums + from + lane * Config::kGroup);
        // The maximum up to each split, then the factors of join_sums().
        float top = fmaxf(own.x, softmax.maximum);
#pragma unroll
        for (int distance = 1; distance < kAhead; distance *= 2) {
          const float other = __shfl_up_sync(kAllLanes, top, distance);
          if (lane >= distance) top = fmaxf(top, other);
        }
        float before = __shfl_up_sync(kAllLanes, top, 1);
        if (lane == 0) before = softmax.maximum;
        softmax.maximum = __shfl_sync(kAllLanes, top, kAhead - 1);
        const float own_scale = exp2_fast(before - top), other_scale = exp2_fast(own.x - top);
        const unsigned seen = __ballot_sync(kAllLanes, own.x != minus_infinity());
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const float a = __shfl_sync(kAllLanes, own_scale, i);
          const float b = __shfl_sync(kAllLanes, other_scale, i);
          const float sum = __shfl_sync(kAllLanes, own.y, i);
          if (!(seen >> i & 1)) continue;
          softmax.sum = __fmaf_rn(sum, b, __fmul_rn(softmax.sum, a));
          left = __fmaf_rn(value[i].x, b, __fmul_rn(left, a));
          right = __fmaf_rn(value[i].y, b, __fmul_rn(right, a));
        }
      }
      const int64_t at = (static_cast<int64_t>(row) * Config::kKvHeads + kv_head) * Config::kGroup;
      reinterpret_cast<uint32_t*>(attended)[(at + head) * kPairs + pair] =
          softmax.result(left, right, sinks + kv_head * Config::kGroup + head);
    }
  }
};
