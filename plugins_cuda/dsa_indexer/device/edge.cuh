// The selection among slots of the last digit: the best by their keys; ties go to lower slots. All
// threads of a CTA call these functions.
#pragma once

#include "chosen.cuh"
#include "config.cuh"

// The digit of the last selected slot, the slots with it, and how many of them are selected.
struct Edge {
  int digit, count, left;
};

// Counts of this thread's digits, the highest first.
struct DigitCounts {
  static constexpr int kOwn = kDigits / Config::kThreads;
  int own[kOwn];

  __device__ __forceinline__ static int top() {
    return kDigits - 1 - static_cast<int>(threadIdx.x) * kOwn;
  }

  // Load from global memory that another launch wrote, or from shared memory.
  __device__ __forceinline__ void load(const int* counts) {
#pragma unroll
    for (int i = 0; i < kOwn; i += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(counts + top() - i - 3);
      own[i] = four.w, own[i + 1] = four.z, own[i + 2] = four.y, own[i + 3] = four.x;
    }
  }

  // Return the digit of the last of the best `num_selected` counted slots.
  __device__ __forceinline__ Edge edge(int num_selected, SelectScratch& scratch) const {
    int sum = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) sum += own[i];
    int above = sum_before(sum, scratch);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (above < num_selected && above + own[i] >= num_selected) {
        scratch.edge_values[0] = top() - i;
        scratch.edge_values[1] = own[i];
        scratch.edge_values[2] = num_selected - above;
      }
      above += own[i];
    }
    __syncthreads();
    return {scratch.edge_values[0], scratch.edge_values[1], scratch.edge_values[2]};
  }
};

// The near slots, and their scores.
struct NearSlots {
  uint32_t* listed;  // [capacity]
  int capacity;
  const float* scores;
  int low, late;  // the row selects from slots low to late − 1

  // List the slots in rising order, up to the capacity.
  __device__ __forceinline__ void list(const Marks& marks, SelectScratch& scratch) const {
    int at = sum_before(marks.own_bits(marks.near), scratch);
    for (int word = marks.begin(); word < marks.end(); ++word) {
      for (uint32_t bits = marks.near[word]; bits != 0; bits &= bits - 1) {
        listed[at++] = 32 * word + __ffs(static_cast<int>(bits)) - 1;
      }
    }
    __syncthreads();
  }

  // Call `use` with the slots of the edge's digit and the rest of their keys, from the list or from
  // all scores.
  template <typename Use>
  __device__ __forceinline__ void each(bool is_listed, const Edge& edge, const DigitKeys& keys,
                                       const Use& use) const {
    constexpr int kAtOnce = 4;
    const int count = is_listed ? edge.count : late - low;
    for (int first = threadIdx.x; first < count; first += kAtOnce * Config::kThreads) {
      int slot[kAtOnce];
      float score[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = min(first + i * Config::kThreads, count - 1);
        slot[i] = is_listed ? static_cast<int>(listed[at]) : low + at;
        score[i] = scores[slot[i]];
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const uint32_t key = ordered_key(score[i]);
        const bool near = first + i * Config::kThreads < count && digit_of(key) == edge.digit;
        if (near) use(key - keys.first, slot[i]);
      }
    }
  }
};

// For a short list: compare each slot with all others. No two are equal, because the index in the
// list is part of the compared value.
__device__ __forceinline__ void resolve_few(const Marks& marks, const Edge& edge,
                                            const DigitKeys& keys, const NearSlots& slots,
                                            SelectScratch& scratch) {
  constexpr int kShares = Config::kThreads / kFew;
  static_assert(kCoarseBits + 8 <= 32 && kFew <= 256, "a key's rest and a place in one word");
  const int at = threadIdx.x % kFew, share = threadIdx.x / kFew;
  int slot = 0;
  if (share == 0) {
    uint32_t ranked = 0;
    if (at < edge.count) {
      slot = static_cast<int>(slots.listed[at]);
      ranked = (ordered_key(slots.scores[slot]) - keys.first) << 8 | (kFew - 1 - at);
    }
    scratch.ranked[at] = ranked;
    scratch.above[at] = 0;
  }
  __syncthreads();
  if (at < edge.count) {
    const uint32_t mine = scratch.ranked[at];
    int above = 0;
#pragma unroll 4
    for (int i = 4 * share; i < edge.count; i += 4 * kShares) {
      const uint4 four = *reinterpret_cast<const uint4*>(scratch.ranked + i);
      above += (four.x > mine) + (four.y > mine) + (four.z > mine) + (four.w > mine);
    }
    atomicAdd(&scratch.above[at], above);
  }
  __syncthreads();
  if (share == 0 && at < edge.count && scratch.above[at] < edge.left) {
    Marks::set(marks.selected, slot);
  }
  __syncthreads();
}

// For many slots: two passes over a histogram determine the remaining bits of the last key.
__device__ __forceinline__ void resolve_many(const Marks& marks, const Edge& edge,
                                             const DigitKeys& keys, const NearSlots& slots,
                                             bool is_listed, SelectScratch& scratch) {
  constexpr int kPassBits = 11;
  static_assert(1 << kPassBits == kDigits && kCoarseBits <= 2 * kPassBits && kFineBits > kPassBits,
                "two passes are enough");
  for (int i = threadIdx.x; i < marks.words; i += Config::kThreads) marks.near[i] = 0;
  uint32_t last = 0;
  int left = edge.left;
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    const int shift = pass == 0 ? keys.bits - kPassBits : 0;
    const int above = pass == 0 ? keys.bits : keys.bits - kPassBits;
    __syncthreads();
    for (int i = threadIdx.x; i < kDigits; i += Config::kThreads) scratch.counts[i] = 0;
    __syncthreads();
    slots.each(is_listed, edge, keys, [&](uint32_t rest, int) {
      if (rest >> above == last >> above)
        atomicAdd(&scratch.counts[rest >> shift & (kDigits - 1)], 1);
    });
    __syncthreads();
    DigitCounts counts;
    counts.load(scratch.counts);
    const Edge level = counts.edge(left, scratch);
    last |= static_cast<uint32_t>(level.digit) << shift;
    left = level.left;
  }
  slots.each(is_listed, edge, keys, [&](uint32_t rest, int slot) {
    if (rest > last) Marks::set(marks.selected, slot);
    if (rest == last) Marks::set(marks.near, slot);
  });
  __syncthreads();
  marks.take_first(left, scratch);
}

// Select the best `edge.left` of the near slots.
__device__ __forceinline__ void resolve_edge(const Marks& marks, const Edge& edge,
                                             const NearSlots& slots, SelectScratch& scratch) {
  if (edge.digit == kZeroDigit) {
    marks.take_first(edge.left, scratch);
    return;
  }
  const DigitKeys keys = keys_of(edge.digit);
  const bool is_listed = edge.count <= slots.capacity;
  if (is_listed) slots.list(marks, scratch);
  if (is_listed && edge.count <= kFew) {
    resolve_few(marks, edge, keys, slots, scratch);
  } else {
    resolve_many(marks, edge, keys, slots, is_listed, scratch);
  }
}
