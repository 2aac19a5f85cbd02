// Which rows go to which expert: top-k of a row's router logits, and the rows of every expert.
//
// The result is what the expert kernels walk over: *items* of one expert and up to pass_rows of its
// rows, experts ascending, rows ascending. An *entry* stands for (row, place): row · top_k + place,
// place = rank of the expert's id among the row's chosen ones.
#pragma once

#include "bf16.cuh"
#include "ptx.cuh"
#include "ptx_routing.cuh"
#include "types.cuh"

struct alignas(16) RoutedItem {
  int expert, first_entry, entries, unused;
};

// The experts that a row has chosen, as bits.
template <int experts>
struct ExpertSet {
  uint32_t words[ceil_div(experts, 32)];
};

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

// One warp: the greatest keys in falling order; they become 0 in ``row``.
template <int experts, int top_k>
__device__ __forceinline__ void best_keys(RowKeys<experts>& row, uint32_t (&best)[top_k]) {
#pragma unroll
  for (int k = 0; k < top_k; ++k) {
    uint32_t mine = row.keys[0];
#pragma unroll
    for (int i = 1; i < ceil_div(experts, 32); ++i) mine = row.keys[i] > mine ? row.keys[i] : mine;
    best[k] = warp_max(mine);
#pragma unroll
    for (int i = 0; i < ceil_div(experts, 32); ++i) {
      row.keys[i] = row.keys[i] == best[k] ? 0u : row.keys[i];
    }
  }
}

// One lane of the warp stores: the chosen experts by ascending id (unless null), and the softmax
// over their logits, which are bf16 values.
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
    if (threadIdx.x % 32 == 0) {
      if (chosen != nullptr) chosen[place] = key_expert(best[k]);
      weights[place] = shares[k] / total;
    }
  }
}

// One warp: the top_k experts of a row by ascending id into ``chosen`` [top_k], and their shares
// into ``weights`` [top_k].
template <int experts, int top_k>
__device__ __forceinline__ void choose_experts(const float* logits, int* chosen, float* weights) {
  RowKeys<experts> row = row_keys<experts>(logits);
  uint32_t best[top_k];
  best_keys<experts>(row, best);
  store_choice<top_k>(best, chosen, weights);
}

// The workspace in ints: the number of items, three unused, the items, the entries. The last CTA of
// the router's launch writes it, unless the rows are few: then every CTA of the expert kernels
// lists them itself from the logits, which is sooner than to wait for that CTA.
template <int rows, int top_k, int experts, int pass_rows>
struct Routing {
  static constexpr bool kListedByReaders = rows <= 32;
  static constexpr int kEntries = rows * top_k;
  static constexpr int kItems = (experts < kEntries ? experts : kEntries) + kEntries / pass_rows;
  static constexpr int kItemsAt = 4;
  static constexpr int kEntriesAt = kItemsAt + 4 * kItems;

  // What is on its way to this thread while it does something else.
  struct Asked {
    RowKeys<experts> keys;
    int live;
  };

  // The CTA's own copy: ask(), then read() by the whole CTA.
  struct Shared {
    RoutedItem items[kItems];
    int entries[kEntries];
    int item_count;
    ExpertSet<experts> chosen[kListedByReaders ? rows : 1];

    // ``row_end`` holds the number of live rows.
    __device__ __forceinline__ Asked ask(const float* logits, const int* row_end) {
      Asked asked = {};
      if constexpr (kListedByReaders) {
        const int row = threadIdx.x / 32;
        asked.live = load_l2_int(row_end);
        if (row < rows) asked.keys = row_keys<experts>(logits + row * experts);
      }
      return asked;
    }

    // Ends with a __syncthreads(). With ``weighted`` also the shares of the entries into
    // ``weights`` [rows, top_k] in shared memory, from ``workspace_weights`` where the router's
    // launch has computed them.
    template <bool weighted>
    __device__ __forceinline__ void read(const Asked& asked, const float* logits,
                                         const int* workspace, const float* workspace_weights,
                                         float* weights) {
      if constexpr (kListedByReaders) {
        choose_all<weighted>(asked, logits, weights);
        __syncthreads();
        if (threadIdx.x < 32) list();
      } else {
        load(workspace);
        for (int i = threadIdx.x; weighted && i < kEntries; i += blockDim.x) {
          weights[i] = load_l2_float(workspace_weights + i);
        }
      }
      __syncthreads();
    }

    __device__ __forceinline__ void load(const int* workspace) {
      if (threadIdx.x == 0) item_count = load_l2_int(workspace);
      for (int i = threadIdx.x; i < kItems; i += blockDim.x) {
        const uint4 v = load_l2_16(workspace + kItemsAt + 4 * i);
        items[i] = {static_cast<int>(v.x), static_cast<int>(v.y), static_cast<int>(v.z), 0};
      }
      for (int i = threadIdx.x; i < kEntries; i += blockDim.x) {
        entries[i] = load_l2_int(workspace + kEntriesAt + i);
      }
    }

    // A warp per row.
    template <bool weighted>
    __device__ __forceinline__ void choose_all(const Asked& asked, const float* logits,
                                               float* weights) {
      const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
      for (int row = warp; row < rows; row += warps) {
        RowKeys<experts> keys = asked.keys;
        if (row != warp && row < asked.live) keys = row_keys<experts>(logits + row * experts);
        uint32_t best[top_k];
        best_keys<experts>(keys, best);
        const bool live = row < asked.live;
#pragma unroll
        for (int i = 0; i < ceil_div(experts, 32); ++i) {
          const bool taken = live && lane + 32 * i < experts && keys.keys[i] == 0u;
          const uint32_t word = __ballot_sync(~0u, taken);
          if (lane == 0) chosen[row].words[i] = word;
        }
        if (weighted && live) store_choice<top_k>(best, nullptr, weights + row * top_k);
      }
    }

    // One warp, a lane per expert: items and entries from ``chosen``.
    __device__ __forceinline__ void list() {
      const int lane = threadIdx.x % 32;
      const uint32_t below = (1u << lane) - 1u;
      int before = 0;
      for (int i = 0; i < ceil_div(experts, 32); ++i) {
        uint32_t hits = 0;
#pragma unroll
        for (int row = 0; row < rows; ++row) hits |= ((chosen[row].words[i] >> lane) & 1u) << row;
        const int count = __popc(hits), passes = ceil_div(count, pass_rows);
        // Entries in the low half of a number, items in the high one.
        const int through = warp_prefix_sum(count | (passes << 16));
        const int first = ((before + through) & 0xFFFF) - count;
        const int item = ((before + through) >> 16) - passes;
        for (int pass = 0; pass < passes; ++pass) {
          const int left = count - pass * pass_rows;
          items[item + pass] = {lane + 32 * i, first + pass * pass_rows,
                                left < pass_rows ? left : pass_rows, 0};
        }
        for (int entry = first; hits != 0u; ++entry, hits &= hits - 1u) {
          const int row = __ffs(hits) - 1;
          int place = __popc(chosen[row].words[i] & below);
          for (int j = 0; j < i; ++j) place += __popc(chosen[row].words[j]);
          entries[entry] = row * top_k + place;
        }
        before += __shfl_sync(~0u, through, 31);
      }
      if (lane == 0) item_count = before >> 16;
    }
  };
};

// The whole CTA: items and entries of ``live`` rows from ``chosen`` [rows, top_k] in shared memory.
// ``counts`` is shared memory of experts ints, ``starts`` of 2 · experts.
template <int rows, int top_k, int experts, int pass_rows>
__device__ __forceinline__ void list_experts(const int* chosen, int live, int* counts, int* starts,
                                             int* workspace) {
  using Layout = Routing<rows, top_k, experts, pass_rows>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const auto place_of = [&](int row, int expert) {
    int place = -1;
    if (row < live) {
#pragma unroll
      for (int k = 0; k < top_k; ++k) place = chosen[row * top_k + k] == expert ? k : place;
    }
    return place;
  };
  for (int expert = warp; expert < experts; expert += warps) {
    int count = 0;
    for (int row = lane; row - lane < live; row += 32) {
      count += __popc(__ballot_sync(~0u, place_of(row, expert) >= 0));
    }
    if (lane == 0) counts[expert] = count;
  }
  __syncthreads();
  if (warp == 0) {
    int entries_before = 0, items_before = 0;
    for (int base = 0; base < experts; base += 32) {
      const int expert = base + lane;
      const int count = expert < experts ? counts[expert] : 0;
      const int items = ceil_div(count, pass_rows);
      const int entries_through = warp_prefix_sum(count), items_through = warp_prefix_sum(items);
      if (expert < experts) {
        starts[2 * expert] = entries_before + entries_through - count;
        starts[2 * expert + 1] = items_before + items_through - items;
      }
      entries_before += __shfl_sync(~0u, entries_through, 31);
      items_before += __shfl_sync(~0u, items_through, 31);
    }
    if (lane == 0) workspace[0] = items_before;
  }
  __syncthreads();
  for (int expert = warp; expert < experts; expert += warps) {
    const int count = counts[expert], first = starts[2 * expert], item = starts[2 * expert + 1];
    auto* items = reinterpret_cast<RoutedItem*>(workspace + Layout::kItemsAt);
    for (int i = lane; i * pass_rows < count; i += 32) {
      const int left = count - i * pass_rows;
      items[item + i] = {expert, first + i * pass_rows, left < pass_rows ? left : pass_rows, 0};
    }
    int before = first;
    for (int row = lane; count > 0 && row - lane < live; row += 32) {
      const int place = place_of(row, expert);
      const uint32_t hits = __ballot_sync(~0u, place >= 0);
      const int rank = before + __popc(hits & ((1u << lane) - 1u));
      if (place >= 0) workspace[Layout::kEntriesAt + rank] = row * top_k + place;
      before += __popc(hits);
    }
  }
}
