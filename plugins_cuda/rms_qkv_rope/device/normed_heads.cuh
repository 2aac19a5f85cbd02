// The heads of queries and keys, each normalized and then rotated in place.
//
// kLanes lanes share a head. A lane has 8 values of the first half and the 8 values that the
// rotation combines with them. The sum of squares adds a lane's 16 values in order, then lanes by a
// butterfly, so its order depends only on the width of a head. If the pools are quantized (kCodes),
// keys are read from `projected`.
//
// kValues: the heads of values follow; they are normalized without a weight and not rotated.
//
// kWhole: one norm covers all heads of a row's queries, and one those of its keys. A CTA has all of
// these heads and adds the sums of its warps in order.
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

  // Thread groups of kLanes have the heads [rows · kHeads] in order. With kWhole a CTA has those of
  // row blockIdx.x: its keys if blockIdx.y is the last, else its queries.
  __device__ __forceinline__ void turn(const uint16_t* q_norm, const uint16_t* k_norm, float eps,
                                       int rows) const {
    const int thread = (kWhole ? 0 : blockIdx.x * blockDim.x) + threadIdx.x;
    const int item = thread / kLanes, lane = thread % kLanes;
    const bool of_keys = blockIdx.y + 1 == gridDim.y;
    const int row = kWhole ? blockIdx.x : item / kHeads;
    const int head = kWhole ? item + (of_keys ? kQHeads : 0) : item % kHeads;
    const bool used = lane < kUsed && (!kWhole || head < (of_keys ? kHeads : kQHeads));
    const uint16_t* norm = (kKvHeads == 0 || head < kQHeads ? q_norm : k_norm) +
                           (kWhole ? item * kHeadDim : 0) + 8 * lane;
    uint4 weight[2] = {};
    const bool is_value = kValues && head >= kTurned;
    if (is_value) {
      weight[0] = weight[1] = make_uint4(kOnes, kOnes, kOnes, kOnes);
    } else if (used) {
      weight[0] = load_constant16(norm);
      weight[1] = load_constant16(norm + kHalf);
    }
    pdl_wait();
    // The next launch, attention, prefetches data that earlier launches wrote (launches.py).
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
  // A pair of weights that multiply by 1.
  static constexpr uint32_t kOnes = kRounding == NormRounding::kOffsetInFp32 ? 0 : 0x3F803F80;

  // Return the sum over the CTA, in all lanes; each group of kLanes contributes one sum.
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
    if (kKvHeads == 0 || head < kQHeads)
      return q + (static_cast<int64_t>(row) * kQHeads + head) * kHeadDim;
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
