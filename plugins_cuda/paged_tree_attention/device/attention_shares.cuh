// The distribution of the sequences of a launch over its CTAs, by their chunks of 128 positions. A
// sequence gets a power of two of CTAs (rounded down, at least one).
//
// Config: BATCH, SPLIT.
#pragma once

#include "../../_device/ptx_attention.cuh"
#include "../../_device/ptx_routing.cuh"
#include "config.cuh"

// The descriptions of the sequences: lane i has those of sequences i, i + 32, ….
struct Lengths {
  static constexpr int kSets = ceil_div(Config::kBatch, 32);
  int lane;
  int row_begin[kSets], row_end[kSets], tree_start[kSets];

  __device__ __forceinline__ Lengths(const int* row_starts, const int* tree_starts)
      : lane(opaque(threadIdx.x % 32)) {
#pragma unroll
    for (int i = 0; i < kSets; ++i) {
      const int sequence = min(32 * i + lane, Config::kBatch - 1);
      row_begin[i] = load_l2_int(row_starts + sequence);
      row_end[i] = load_l2_int(row_starts + sequence + 1);
      tree_start[i] = load_l2_int(tree_starts + sequence);
    }
  }

  // Return the chunks of this lane's sequence, 0 without rows. A row may attend to fewer.
  __device__ __forceinline__ int chunks(int set) const {
    const bool real = 32 * set + lane < Config::kBatch;
    const int rows = row_end[set] - row_begin[set];
    return real && rows > 0 ? ((tree_start[set] + rows) >> 7) + 1 : 0;
  }
};

// The share of a CTA: the splits of a sequence's rows that equal `cta` modulo `ctas`.
struct __align__(16) Share {
  int sequence;  // BATCH if there is no share
  int row_begin, row_end, tree_start;
  int cta, ctas;
  int next, total;  // the number of the CTA's next share, and the number of shares
};

// Return share `number` of a launch with `max_ctas` CTAs; one warp calls it. The number of shares
// of a sequence is a power of two.
__device__ __forceinline__ Share share_of(const Lengths& all, int number, int max_ctas) {
  constexpr int kSets = Lengths::kSets;
  int through[kSets], ctas[kSets], total = 0;
#pragma unroll
  for (int i = 0; i < kSets; ++i) {
    total += __shfl_sync(~0u, warp_prefix_sum(all.chunks(i), all.lane), 31);
  }
  const int of_a_cta = max(1, ceil_div(total, max_ctas));
  int before = 0, passed = 0;
#pragma unroll
  for (int i = 0; i < kSets; ++i) {
    const int fair_share = min(all.chunks(i) / of_a_cta, Config::kSplit);
    ctas[i] = all.chunks(i) == 0 ? 0 : 1 << (31 - __clz(max(1, fair_share)));
    through[i] = before + warp_prefix_sum(ctas[i], all.lane);
    before = __shfl_sync(~0u, through[i], 31);
    passed += __popc(__ballot_sync(~0u, through[i] <= number));
  }
  Share share{Config::kBatch, 0, 0, 0, 0, 1, number + max_ctas, before};
  if (passed >= Config::kBatch) return share;
#pragma unroll
  for (int i = 0; i < kSets; ++i) {
    const int from = passed % 32;
    const int row_begin = __shfl_sync(~0u, all.row_begin[i], from);
    const int row_end = __shfl_sync(~0u, all.row_end[i], from);
    const int tree_start = __shfl_sync(~0u, all.tree_start[i], from);
    const int end = __shfl_sync(~0u, through[i], from);
    const int of = __shfl_sync(~0u, ctas[i], from);
    if (passed / 32 != i) continue;
    share = {passed, row_begin,         row_end, tree_start, number - (end - of),
             of,     number + max_ctas, before};
  }
  return share;
}
