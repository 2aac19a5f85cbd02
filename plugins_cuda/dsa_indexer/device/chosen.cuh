// Bit masks of the slots that a row selects, and their conversion to a list. All threads of a CTA
// call these functions.
//
// Members of Config: kThreads, kWords.
#pragma once

#include "../../_device/list_range.cuh"
#include "../../_device/ptx.cuh"
#include "config.cuh"
#include "digits.cuh"

constexpr int kSelectWarps = Config::kThreads / 32;
// The maximum number of slots that are ranked by comparing each with all.
constexpr int kFew = 256;
static_assert(Config::kThreads % kFew == 0 && kDigits % (4 * Config::kThreads) == 0,
              "threads share both evenly");

struct SelectScratch {
  int sums[kSelectWarps];
  int edge_values[3];
  __align__(16) uint32_t ranked[kFew];
  int above[kFew];
  __align__(16) int counts[kDigits];
};

// Return the sum of `value` over the threads before this one.
__device__ __forceinline__ int sum_before(int value, SelectScratch& scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int upto = value;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(kAllLanes, upto, distance);
    if (lane >= distance) upto += other;
  }
  __syncthreads();
  if (lane == 31) scratch.sums[warp] = upto;
  __syncthreads();
  int before = upto - value;
#pragma unroll
  for (int i = 0; i < kSelectWarps; ++i) before += i < warp ? scratch.sums[i] : 0;
  return before;
}

// Return the index of set bit number `n` of a word; more than `n` bits are set.
__device__ __forceinline__ int bit_number(uint32_t bits, int n) {
  int place = 0;
#pragma unroll
  for (int half = 16; half > 0; half /= 2) {
    const int below = __popc(bits >> place & ((1u << half) - 1u));
    const bool above = n >= below;
    n -= above ? below : 0;
    place += above ? half : 0;
  }
  return place;
}

// Masks in shared memory, [words] each.
struct Marks {
  uint32_t* selected;
  uint32_t* near;  // slots that are not decided yet; write() reuses it for counts
  int words;

  // A thread's words are adjacent, an odd number of them, so that threads use different banks.
  __device__ __forceinline__ int begin() const {
    return min(static_cast<int>(threadIdx.x) * of_a_thread(), words);
  }
  __device__ __forceinline__ int end() const {
    return min(begin() + of_a_thread(), words);
  }
  __device__ __forceinline__ int of_a_thread() const {
    return ceil_div(words, Config::kThreads) | 1;
  }

  // Load the masks that the row's CTAs wrote, {selected, near} per word.
  __device__ __forceinline__ void load(const uint2* marks) const {
    constexpr int kAtOnce = 4;
    const int pairs = ceil_div(words, 2);
    for (int first = threadIdx.x; first < pairs; first += kAtOnce * Config::kThreads) {
      uint4 two[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = first + i * Config::kThreads;
        if (at < pairs) two[i] = load_l2_16(marks + 2 * at);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = first + i * Config::kThreads;
        if (at >= pairs) break;
        *reinterpret_cast<uint2*>(selected + 2 * at) = make_uint2(two[i].x, two[i].z);
        *reinterpret_cast<uint2*>(near + 2 * at) = make_uint2(two[i].y, two[i].w);
      }
    }
  }

  __device__ __forceinline__ static void set(uint32_t* bits, int slot) {
    atomicOr(&bits[slot / 32], 1u << slot % 32);
  }

  // Return the number of `bits` in this thread's words.
  __device__ __forceinline__ int own_bits(const uint32_t* bits) const {
    int count = 0;
#pragma unroll 4
    for (int word = begin(); word < end(); ++word) count += __popc(bits[word]);
    return count;
  }

  // Select the first `count` of the near slots.
  __device__ __forceinline__ void take_first(int count, SelectScratch& scratch) const {
    int left = count - sum_before(own_bits(near), scratch);
    for (int word = begin(); word < end() && left > 0; ++word) {
      const uint32_t bits = near[word];
      const int own = __popc(bits);
      selected[word] |= own <= left ? bits : bits & ((1u << bit_number(bits, left)) - 1u);
      left -= own;
    }
  }

  // Write the `count` selected slots as a list.
  __device__ __forceinline__ void write(int* list, int count, SelectScratch& scratch) const {
    constexpr int kAtOnce = 4;
    int* before = reinterpret_cast<int*>(near);
    int upto = sum_before(own_bits(selected), scratch);
#pragma unroll 4
    for (int word = begin(); word < end(); ++word) {
      before[word] = upto;
      upto += __popc(selected[word]);
    }
    __syncthreads();
    const int top = 1 << (31 - __clz(words));
    for (int first = threadIdx.x; first < count; first += kAtOnce * Config::kThreads) {
      // Binary search for the last word with no more bits before it than an entry's index.
      int word[kAtOnce] = {};
      for (int step = top; step > 0; step /= 2) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int next = word[i] + step;
          if (next < words && before[next] <= first + i * Config::kThreads) word[i] = next;
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = first + i * Config::kThreads;
        if (at >= count) break;
        list[at] = 32 * word[i] + bit_number(selected[word[i]], at - before[word[i]]);
      }
    }
  }
};
