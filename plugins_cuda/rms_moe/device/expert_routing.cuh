// Which rows go to which expert: top-k of a row's router logits, and the rows of every expert.
//
// The result is what the expert kernels walk over: *items* of one expert and up to pass_rows of its
// rows, experts ascending, rows ascending. An *entry* stands for (row, place): row · top_k + place,
// place = rank of the expert's id among the row's chosen ones.
#pragma once

#include "../../_device/bf16.cuh"
#include "../../_device/ptx.cuh"
#include "../../_device/ptx_routing.cuh"
#include "../../_device/types.cuh"

struct alignas(16) RoutedItem {
  int expert, first_entry, entries;
  int cost_before;  // of all items before it, by item_cost(); only where RoutedRows::kUneven
};

// What a unit of an item costs a warp, measured: more than 8 rows take twice the products of fewer.
constexpr int kFewRowsCost = 8, kManyRowsCost = 10;
__device__ __forceinline__ int item_cost(int entries) {
  return entries > 8 ? kManyRowsCost : entries > 0 ? kFewRowsCost : 0;
}

// What a lane holds of a row's router logits: keys of the experts lane, lane + 32, ….
template <int experts>
struct RowKeys {
  uint32_t keys[ceil_div(experts, 32)];
};

// Orders a bf16 logit and an expert's id as one number: greater is chosen first. Ties go to the
// lower id, −0 equals +0, and a NaN comes first; the number is never 0.
__device__ __forceinline__ uint32_t routing_key(float logit, int expert) {
  const uint32_t bits = __float_as_uint(logit + 0.0f) >> 16;
  const uint32_t ordered = bits & 0x8000u ? ~bits & 0xFFFFu : bits | 0x8000u;
  return ordered << 16 | (0xFFFFu - static_cast<uint32_t>(expert));
}

__device__ __forceinline__ int key_expert(uint32_t key) {
  return static_cast<int>(0xFFFFu - (key & 0xFFFFu));
}

__device__ __forceinline__ float key_logit(uint32_t key) {
  const uint32_t ordered = key >> 16;
  const uint32_t bits = ordered & 0x8000u ? ordered & 0x7FFFu : ~ordered & 0xFFFFu;
  return __uint_as_float(bits << 16);
}

// One warp: a row's keys. ``logits`` [experts] fp32 were written by other CTAs.
template <int experts>
__device__ __forceinline__ auto row_keys(const float* logits) {
  RowKeys<experts> row;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < ceil_div(experts, 32); ++i) {
    const int expert = lane + 32 * i;
    row.keys[i] = expert < experts ? routing_key(load_l2_float(logits + expert), expert) : 0u;
  }
  return row;
}

// One warp: the greatest keys of each of several rows in falling order; they become 0 in ``rows``.
template <int experts, int top_k, int count>
__device__ __forceinline__ void best_keys(RowKeys<experts> (&rows)[count],
                                          uint32_t (&best)[count][top_k]) {
#pragma unroll
  for (int k = 0; k < top_k; ++k) {
    // Side by side: one row's maxima wait for each other.
#pragma unroll
    for (int r = 0; r < count; ++r) {
      uint32_t mine = rows[r].keys[0];
#pragma unroll
      for (const uint32_t key : rows[r].keys) mine = key > mine ? key : mine;
      best[r][k] = warp_max(mine);
#pragma unroll
      for (uint32_t& key : rows[r].keys) key = key == best[r][k] ? 0u : key;
    }
  }
}

// One lane: the chosen experts by ascending id (unless null), and the softmax over their logits,
// which are bf16 values.
template <int top_k>
__device__ __forceinline__ void store_choice(const uint32_t (&best)[top_k], int* chosen,
                                             float* weights) {
  float shares[top_k], total = 0.0f;
#pragma unroll
  for (int k = 0; k < top_k; ++k) {
    shares[k] = expf(key_logit(best[k]) - key_logit(best[0]));
    total += shares[k];
  }
#pragma unroll
  for (int k = 0; k < top_k; ++k) {
    int place = 0;
#pragma unroll
    for (int j = 0; j < top_k; ++j) place += key_expert(best[j]) < key_expert(best[k]);
    if (chosen != nullptr) chosen[place] = key_expert(best[k]);
    weights[place] = shares[k] / total;
  }
}

// One warp: the top_k experts of a row by ascending id into ``chosen`` [top_k], and their shares
// into ``weights`` [top_k].
template <int experts, int top_k>
__device__ __forceinline__ void choose_experts(const float* logits, int* chosen, float* weights) {
  RowKeys<experts> row[1] = {row_keys<experts>(logits)};
  uint32_t best[1][top_k];
  best_keys<experts, top_k>(row, best);
  if (threadIdx.x % 32 == 0) store_choice<top_k>(best[0], chosen, weights);
}

// Items and entries in a CTA's shared memory. Every CTA of the expert kernels lists them itself
// from the logits: that is sooner than to wait for a CTA that lists them for all. clear() first,
// ask() where the logits are final, then read().
//
// C: kRows of the launch, kTopK, kExperts, kPassRows, kWarps of the CTA.
template <class C>
struct RoutedRows {
  static constexpr int kEntries = C::kRows * C::kTopK;
  static constexpr int kItems =
      (C::kExperts < kEntries ? C::kExperts : kEntries) + kEntries / C::kPassRows;
  // An expert stands at lane expert % 32 of set expert / 32.
  static constexpr int kSets = ceil_div(C::kExperts, 32), kColumns = 32 * kSets;
  static constexpr int kWords = ceil_div(C::kRows, 32);
  // Whether one item may cost more than another.
  static constexpr bool kUneven = C::kPassRows > 8 && C::kRows > 8;
  // A warp holds the logits of so many rows at once: up to 16 registers.
  static constexpr int kMostHeld = kSets < 16 ? 16 / kSets : 1;
  static constexpr int kHeld =
      ceil_div(C::kRows, C::kWarps) < kMostHeld ? ceil_div(C::kRows, C::kWarps) : kMostHeld;
  // Rows that a warp lists one after the other, all of one word.
  static constexpr int kRun = C::kRows < 4 ? C::kRows : 4;

  RoutedItem items[kItems];
  int entries[kEntries];
  int item_count;
  int cost;  // of all items, only where kUneven
  // The rows that have chosen an expert, as bits: words of 32 rows by columns of experts.
  uint32_t takers[kWords * kColumns];

  // What is on its way to this thread while it does something else: rows warp, warp + warps, ….
  struct Asked {
    RowKeys<C::kExperts> held[kHeld];
    int live;
  };

  // Ends with a __syncthreads(), but for one row: nothing is to be cleared there.
  __device__ __forceinline__ void clear() {
    if constexpr (C::kRows == 1) return;
#pragma unroll
    for (int first = 0; first < kWords * kColumns; first += 32 * C::kWarps) {
      const int i = first + threadIdx.x;
      if (i < kWords * kColumns) takers[i] = 0u;
    }
    __syncthreads();
  }

  // ``row_end`` holds the number of live rows.
  __device__ __forceinline__ Asked ask(const float* logits, const int* row_end) const {
    Asked asked = {};
    asked.live = load_l2_int(row_end);
    ask_rows(asked, logits, threadIdx.x / 32);
    return asked;
  }

  // Ends with a __syncthreads(). Unless ``shares`` is null, also those of the entries into
  // ``shares`` [rows, top_k] in shared memory.
  __device__ __forceinline__ void read(Asked& asked, const float* logits, float* shares) {
    const int warp = threadIdx.x / 32;
    if constexpr (C::kRows == 1) {
      if (warp == 0) list_only_row(asked, shares);
      __syncthreads();
      return;
    }
    choose(asked, warp, shares);
#pragma unroll 1
    for (int first = kHeld * C::kWarps; first < C::kRows; first += kHeld * C::kWarps) {
      ask_rows(asked, logits, first + warp);
      choose(asked, first + warp, shares);
    }
    __syncthreads();
    list();
    __syncthreads();
  }

  // One warp: the first unit of CTA ``cta`` of ``ctas``, each of which gets about as much to do; an
  // item is ``units`` of them, and CTA ``ctas`` begins behind the last.
  template <int units, int ctas>
  __device__ __forceinline__ int first_unit(int cta) const {
    if (!kUneven || item_count == 0) return item_count * units * cta / ctas;
    const int all = cost * units, at = all / ctas * cta + all % ctas * cta / ctas;
    int begun = 0;
#pragma unroll
    for (int i = 0; i < ceil_div(kItems, 32); ++i) {
      const int item = static_cast<int>(threadIdx.x) % 32 + 32 * i;
      const bool begins = item < item_count && items[item].cost_before * units <= at;
      begun += __popc(__ballot_sync(~0u, begins));
    }
    const RoutedItem item = items[begun - 1];
    const int left = at - item.cost_before * units;
    const int units_before =
        item.entries > 8 ? ceil_div(left, kManyRowsCost) : ceil_div(left, kFewRowsCost);
    return (begun - 1) * units + units_before;
  }

 private:
  static __device__ __forceinline__ void ask_rows(Asked& asked, const float* logits, int first) {
#pragma unroll
    for (int r = 0; r < kHeld; ++r) {
      const int row = first + r * C::kWarps;
      if (row < C::kRows) asked.held[r] = row_keys<C::kExperts>(logits + row * C::kExperts);
    }
  }

  // One warp, all of it in registers: the experts of the only row.
  __device__ __forceinline__ void list_only_row(Asked& asked, float* shares) {
    const int lane = threadIdx.x % 32;
    uint32_t best[1][C::kTopK];
    best_keys<C::kExperts, C::kTopK>(asked.held, best);
    int own = 0, place = 0;
#pragma unroll
    for (int k = 0; k < C::kTopK; ++k) own = lane == k ? key_expert(best[0][k]) : own;
#pragma unroll
    for (int k = 0; k < C::kTopK; ++k) place += key_expert(best[0][k]) < own;
    if (lane < C::kTopK) {
      items[place] = {own, place, 1, 0};
      entries[place] = place;
    }
    if (lane == 0) {
      item_count = asked.live > 0 ? C::kTopK : 0;
      if (shares != nullptr) store_choice<C::kTopK>(best[0], nullptr, shares);
    }
  }

  // One warp: the experts of the rows that it holds, first, first + warps, ….
  __device__ __forceinline__ void choose(Asked& asked, int first, float* shares) {
    const int lane = threadIdx.x % 32;
    if (first >= asked.live) return;
    uint32_t best[kHeld][C::kTopK];
    best_keys<C::kExperts, C::kTopK>(asked.held, best);
#pragma unroll
    for (int r = 0; r < kHeld; ++r) {
      const int row = first + r * C::kWarps;
#pragma unroll
      for (int i = 0; i < kSets; ++i) {
        const bool taken = row < asked.live && lane + 32 * i < C::kExperts;
        if (taken && asked.held[r].keys[i] == 0u) {
          atomicOr(&takers[row / 32 * kColumns + lane + 32 * i], 1u << row % 32);
        }
      }
    }
    if (shares == nullptr) return;
    // A lane a row.
    uint32_t own[C::kTopK] = {};
#pragma unroll
    for (int r = 0; r < kHeld; ++r) {
#pragma unroll
      for (int k = 0; k < C::kTopK; ++k) own[k] = lane == r ? best[r][k] : own[k];
    }
    const int row = first + lane * C::kWarps;
    if (lane < kHeld && row < asked.live)
      store_choice<C::kTopK>(own, nullptr, shares + row * C::kTopK);
  }

  // A lane an expert of each set. All warps count what lies before an expert, one lists the items,
  // and each some runs of rows.
  __device__ __forceinline__ void list() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int counts[kSets], through[kSets];
#pragma unroll
    for (int i = 0; i < kSets; ++i) {
      counts[i] = 0;
#pragma unroll
      for (int w = 0; w < kWords; ++w) counts[i] += __popc(takers[w * kColumns + lane + 32 * i]);
      // Entries in the low half of a number, items in the high one.
      through[i] = warp_prefix_sum(counts[i] | (ceil_div(counts[i], C::kPassRows) << 16));
    }
    int before = 0, costs = 0;
#pragma unroll
    for (int i = 0; i < kSets; ++i) {
      const int all = __shfl_sync(~0u, through[i], 31);
      through[i] += before;
      before += all;
    }
    if (warp == C::kWarps - 1) {
#pragma unroll
      for (int i = 0; i < kSets; ++i) {
        int cost_before = costs;
        if constexpr (kUneven) {
          const int whole = counts[i] / C::kPassRows * item_cost(C::kPassRows);
          const int own = whole + item_cost(counts[i] % C::kPassRows);
          const int cost_through = costs + warp_prefix_sum(own);
          cost_before = cost_through - own;
          costs = __shfl_sync(~0u, cost_through, 31);
        }
        const int passes = ceil_div(counts[i], C::kPassRows);
        const int entry = (through[i] & 0xFFFF) - counts[i], item = (through[i] >> 16) - passes;
#pragma unroll 1
        for (int pass = 0; pass < passes; ++pass) {
          const int left = counts[i] - pass * C::kPassRows;
          items[item + pass] = {lane + 32 * i, entry + pass * C::kPassRows,
                                left < C::kPassRows ? left : C::kPassRows,
                                cost_before + pass * item_cost(C::kPassRows)};
        }
      }
      if (lane == 0) {
        item_count = before >> 16;
        cost = costs;
      }
    }
#pragma unroll 1
    for (int first = kRun * warp; first < C::kRows; first += kRun * C::kWarps) {
      list_rows(first, counts, through);
    }
  }

  // Entries of the rows first … first + kRun − 1, which are of one word.
  __device__ __forceinline__ void list_rows(int first, const int (&counts)[kSets],
                                            const int (&through)[kSets]) {
    const int lane = threadIdx.x % 32, word = first / 32;
    uint32_t taken[kSets];
    int next[kSets];
#pragma unroll
    for (int i = 0; i < kSets; ++i) {
      taken[i] = takers[word * kColumns + lane + 32 * i];
      next[i] = (through[i] & 0xFFFF) - counts[i] + __popc(taken[i] & ((1u << first % 32) - 1u));
#pragma unroll
      for (int w = 0; w < kWords - 1; ++w) {
        if (w < word) next[i] += __popc(takers[w * kColumns + lane + 32 * i]);
      }
    }
#pragma unroll
    for (int r = 0; r < kRun; ++r) {
      int place = 0;
#pragma unroll
      for (int i = 0; i < kSets; ++i) {
        const bool takes = taken[i] >> ((first + r) % 32) & 1u;
        const uint32_t all = __ballot_sync(~0u, takes);
        if (takes) {
          entries[next[i]++] = (first + r) * C::kTopK + place + __popc(all & ((1u << lane) - 1u));
        }
        place += __popc(all);
      }
    }
  }
};
