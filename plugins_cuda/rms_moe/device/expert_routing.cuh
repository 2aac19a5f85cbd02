// The routing of rows to experts: the selection of each row, and the rows of every expert.
//
// The expert kernels process *items*: one expert and up to pass_rows of its rows, with experts and
// rows ascending. An *entry* of (row, place) is row · top_k + place, where place is the rank of the
// expert's id among the row's selected ones.
#pragma once

#include "../../_device/ptx.cuh"
#include "../../_device/ptx_routing.cuh"
#include "../../_device/types.cuh"
#include "expert_choice.cuh"

struct alignas(16) RoutedItem {
  int expert, first_entry, entries;
  int cost_before;  // of all items before it, by item_cost(); only if RoutedRows::kUneven
};

// The measured cost of a unit of an item: more than 8 rows need twice the products.
constexpr int kFewRowsCost = 8, kManyRowsCost = 10;
__device__ __forceinline__ int item_cost(int entries) {
  return entries > 8 ? kManyRowsCost : entries > 0 ? kFewRowsCost : 0;
}

// The items and entries, in a CTA's shared memory. Every CTA of the expert kernels computes them
// from the logits, which is faster than to wait for one CTA that computes them for all. Call
// clear() first, ask() when the logits are final, then read().
//
// C: kRows of the launch, kTopK, kExperts, kPassRows, kWarps of the CTA, kScored and the members
// that its choice needs.
template <class C>
struct RoutedRows {
  using Choice = ChoiceOf<C>;
  static constexpr int kEntries = C::kRows * C::kTopK;
  static constexpr int kItems =
      (C::kExperts < kEntries ? C::kExperts : kEntries) + kEntries / C::kPassRows;
  // Expert e is in lane e % 32 of set e / 32.
  static constexpr int kSets = ceil_div(C::kExperts, 32), kColumns = 32 * kSets;
  static constexpr int kWords = ceil_div(C::kRows, 32);
  // Whether items may have different costs.
  static constexpr bool kUneven = C::kPassRows > 8 && C::kRows > 8;
  // The rows whose logits a warp holds at once, in up to 16 registers.
  static constexpr int kMaxHeld = kSets < 16 ? 16 / kSets : 1;
  static constexpr int kHeld =
      ceil_div(C::kRows, C::kWarps) < kMaxHeld ? ceil_div(C::kRows, C::kWarps) : kMaxHeld;
  // Rows of one word that a warp lists in sequence.
  static constexpr int kRun = C::kRows < 4 ? C::kRows : 4;

  RoutedItem items[kItems];
  int entries[kEntries];
  int item_count;
  int cost;  // of all items, only if kUneven
  // The rows that have selected an expert, as bits: words of 32 rows × columns of experts.
  uint32_t takers[kWords * kColumns];

  // The loads of this thread in flight: rows warp, warp + warps, …
  struct Asked {
    typename Choice::Row held[kHeld];
    int live;
  };

  // It ends with a __syncthreads(), except for one row, where nothing must be cleared.
  __device__ __forceinline__ void clear() {
    if constexpr (C::kRows == 1) return;
#pragma unroll
    for (int first = 0; first < kWords * kColumns; first += 32 * C::kWarps) {
      const int i = first + threadIdx.x;
      if (i < kWords * kColumns) takers[i] = 0u;
    }
    __syncthreads();
  }

  // ``row_end`` is the address of the number of live rows.
  __device__ __forceinline__ Asked ask(const float* logits, const int* row_end) const {
    Asked asked = {};
    asked.live = load_l2_int(row_end);
    ask_rows(asked, logits, threadIdx.x / 32);
    return asked;
  }

  // It ends with a __syncthreads(). Unless ``shares`` is null, it also writes the weights of the
  // entries to ``shares`` [rows, top_k] in shared memory.
  __device__ __forceinline__ void read(Asked& asked, const float* logits, float* shares) {
    const int warp = threadIdx.x / 32;
    if constexpr (C::kRows == 1) {
      if (warp == 0) list_only_row(asked, logits, shares);
      __syncthreads();
      return;
    }
    choose(asked, warp, logits, shares);
#pragma unroll 1
    for (int first = kHeld * C::kWarps; first < C::kRows; first += kHeld * C::kWarps) {
      ask_rows(asked, logits, first + warp);
      choose(asked, first + warp, logits, shares);
    }
    __syncthreads();
    list();
    __syncthreads();
  }

  // One warp returns the first unit of CTA ``cta`` of ``ctas``, such that all have about the same
  // cost. An item has ``units`` units; CTA ``ctas`` starts after the last one.
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
      if (row < C::kRows) asked.held[r] = Choice::read(logits + row * Choice::kLogits);
    }
  }

  // One warp lists the experts of the only row, in registers.
  __device__ __forceinline__ void list_only_row(Asked& asked, const float* logits, float* shares) {
    const int lane = threadIdx.x % 32;
    typename Choice::Best best[1];
    Choice::choose(asked.held, best, shares != nullptr);
    int own = 0, place = 0;
#pragma unroll
    for (int k = 0; k < C::kTopK; ++k) own = lane == k ? best[0].expert(k) : own;
#pragma unroll
    for (int k = 0; k < C::kTopK; ++k) place += best[0].expert(k) < own;
    if (lane < C::kTopK) {
      items[place] = {own, place, 1, 0};
      entries[place] = place;
    }
    if (lane == 0) {
      item_count = asked.live > 0 ? C::kTopK : 0;
      if (shares != nullptr) Choice::store(best[0], logits, nullptr, shares);
    }
  }

  // One warp selects the experts of the rows that it holds, first, first + warps, …
  __device__ __forceinline__ void choose(Asked& asked, int first, const float* logits,
                                         float* shares) {
    const int lane = threadIdx.x % 32;
    if (first >= asked.live) return;
    typename Choice::Best best[kHeld];
    Choice::choose(asked.held, best, shares != nullptr);
#pragma unroll
    for (int r = 0; r < kHeld; ++r) {
      const int row = first + r * C::kWarps;
#pragma unroll
      for (int i = 0; i < kSets; ++i) {
        const bool taken = row < asked.live && lane + 32 * i < C::kExperts;
        if (taken && asked.held[r].taken(i)) {
          atomicOr(&takers[row / 32 * kColumns + lane + 32 * i], 1u << row % 32);
        }
      }
    }
    if (shares == nullptr) return;
    // One lane per row.
    typename Choice::Best own = {};
#pragma unroll
    for (int r = 0; r < kHeld; ++r) own.take(lane == r, best[r]);
    const int row = first + lane * C::kWarps;
    if (lane < kHeld && row < asked.live)
      Choice::store(own, logits + row * Choice::kLogits, nullptr, shares + row * C::kTopK);
  }

  // One lane per expert of each set. All warps count the entries before an expert; one lists the
  // items, and each lists some runs of rows.
  __device__ __forceinline__ void list() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int counts[kSets], through[kSets];
#pragma unroll
    for (int i = 0; i < kSets; ++i) {
      counts[i] = 0;
#pragma unroll
      for (int w = 0; w < kWords; ++w) counts[i] += __popc(takers[w * kColumns + lane + 32 * i]);
      // Entries are in the low half of a number, items in the high one.
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

  // List the entries of the rows first … first + kRun − 1, which are in one word.
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
