// Heads of queries and keys, each through a norm of its own, then rotated, where they stand.
//
// kLanes lanes share a head: a lane has 8 values of its first half and those 8 that the rotation
// mixes with them. The sum of squares is taken over a lane's 16 in order, then over lanes by
// halving: it belongs to the head's width alone. Of a pool of codes (kCodes) keys come from
// `projected`.
//
// kValues: heads of values behind them are normed without a weight, and do not turn.
//
// kWhole: one norm over all heads of a row's queries, and one over its keys. A CTA has all of them:
// its warps' sums are added up in order.
#pragma once

#include "../../_device/angles.cuh"
#include "cache_codes.cuh"
#include "query_growth.cuh"
#include "../../_device/normed_rows.cuh"

template <int kQHeads, int kKvHeads, int kHeadDim, int kPageSize, NormRounding kRounding,
          bool kCodes = false, bool kWhole = false, bool kValues = false>
struct NormedHeads {
  static constexpr int kTurned = kQHeads + kKvHeads, kHalf = kHeadDim / 2;
  static constexpr int kHeads = kTurned + (kValues ? kKvHeads : 0);
  static constexpr int kUsed = kHeadDim / 16;
  static constexpr int kLanes = kUsed <= 1    ? 1
                                : kUsed <= 2  ? 2
                                : kUsed <= 4  ? 4
                                : kUsed <= 8  ? 8
                                : kUsed <= 16 ? 16
                                              : 32;
  static_assert(kHeadDim % 16 == 0 && kUsed <= kLanes, "16 values a lane, a warp at most");

  const float* cos;
  const float* sin;
  const int* positions;
  const int* write_slot;
  uint16_t* k_pool;
  uint16_t* v_pool;
  uint16_t* q;
  uint16_t* projected = nullptr;  // [rows, kKvHeads, kHeadDim]

  // Heads [rows · kHeads], the one numbered by the grid's threads over kLanes; with kWhole those of
  // row blockIdx.x, of its queries or, in the last of blockIdx.y, its keys.
  __device__ __forceinline__ void turn(const uint16_t* q_norm, const uint16_t* k_norm, float eps,
                                       int rows) const {
    const int thread = (kWhole ? 0 : blockIdx.x * blockDim.x) + threadIdx.x;
    const int item = thread / kLanes, lane = thread % kLanes;
    const bool of_keys = blockIdx.y + 1 == gridDim.y;
    const int row = kWhole ? blockIdx.x : item / kHeads;
    const int head = kWhole ? item + (of_keys ? kQHeads : 0) : item % kHeads;
    const bool used = lane < kUsed && (!kWhole || head < (of_keys ? kHeads : kQHeads));
    const uint16_t* norm =
        (head < kQHeads ? q_norm : k_norm) + (kWhole ? item * kHeadDim : 0) + 8 * lane;
    uint4 weight[2] = {};
    const bool is_value = kValues && head >= kTurned;
    if (is_value) {
      weight[0] = weight[1] = make_uint4(kOnes, kOnes, kOnes, kOnes);
    } else if (used) {
      weight[0] = load_constant16(norm);
      weight[1] = load_constant16(norm + kHalf);
    }
    pdl_wait();
    // The attention behind reads early what was there before (launches.py).
    pdl_launch_dependents();
    const bool live = used && row < rows;
    uint4 first = make_uint4(0, 0, 0, 0), second = first;
    uint16_t* place = nullptr;
    Angles at;
    if (live) {
      place = place_of(row, head) + 8 * lane;
      first = load_l2_16(place);
      second = load_l2_16(place + kHalf);
      const int64_t angle = static_cast<int64_t>(load_l2_int(positions + row)) * kHalf + 8 * lane;
      at.load(cos + angle, sin + angle);
    }
    float sum = sum_of_squares(first) + sum_of_squares(second);
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, offset);
    }
    int values = kHeadDim;
    if constexpr (kWhole) {
      values *= of_keys ? kKvHeads : kQHeads;
      sum = sum_of_row(sum);
    }
    if (!live) return;
    const float scale = rsqrtf(sum * (1.0f / values) + eps);
    first = normed_vector<kRounding>(first, weight[0], scale);
    second = normed_vector<kRounding>(second, weight[1], scale);
    if (!is_value) at.rotate(first, second);
    if (Config::kGrowth != 0 && head < kQHeads) {
      const float factor = growth_at(cos, load_l2_int(positions + row));
      first = grown(first, factor);
      second = grown(second, factor);
    }
    if (kCodes && head >= kQHeads) {
      uint8_t* codes = reinterpret_cast<uint8_t*>(k_pool) + entry_of(row, head) + 8 * lane;
      *reinterpret_cast<uint2*>(codes) = cache_codes(first);
      *reinterpret_cast<uint2*>(codes + kHalf) = cache_codes(second);
      return;
    }
    *reinterpret_cast<uint4*>(place) = first;
    *reinterpret_cast<uint4*>(place + kHalf) = second;
  }

 private:
  // A pair of weights that change nothing.
  static constexpr uint32_t kOnes = kRounding == NormRounding::kOffsetInFp32 ? 0 : 0x3F803F80;

  // What all lanes of a CTA hold, whose groups of kLanes have one sum each.
  static __device__ __forceinline__ float sum_of_row(float sum) {
    __shared__ float sums[32];
#pragma unroll
    for (int offset = kLanes; offset < 32; offset *= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, offset);
    }
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    float all = 0.0f;
    for (int warp = 0; warp < static_cast<int>(blockDim.x) / 32; ++warp) all += sums[warp];
    return all;
  }

  __device__ __forceinline__ uint16_t* place_of(int row, int head) const {
    if (head < kQHeads) return q + (static_cast<int64_t>(row) * kQHeads + head) * kHeadDim;
    if (kCodes) {
      return projected + (static_cast<int64_t>(row) * kKvHeads + head - kQHeads) * kHeadDim;
    }
    return kValues && head >= kTurned ? v_pool + entry_of(row, head - kKvHeads)
                                      : k_pool + entry_of(row, head);
  }

  // The first value of a key in the pool.
  __device__ __forceinline__ int64_t entry_of(int row, int head) const {
    const int slot = load_l2_int(write_slot + row);
    const int64_t page = static_cast<int64_t>(slot / kPageSize) * kKvHeads + (head - kQHeads);
    return (page * kPageSize + slot % kPageSize) * kHeadDim;
  }
};
