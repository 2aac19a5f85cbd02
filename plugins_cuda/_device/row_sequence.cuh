// The sequence of a row of a launch.
#pragma once

#include "ptx.cuh"

// The index of a sequence and its entries of two arrays; the index is the batch size if the row
// belongs to no sequence.
struct RowSequence {
  int index, start, budget;
};

// The entries of the first 32 sequences, lane b those of sequence b. They are loaded together with
// other data that the kernel needs first, so that there is one memory latency.
struct FirstSequences {
  int end, start, budget;

  __device__ __forceinline__ FirstSequences(const int* row_start, int batch, const int* tree_start,
                                            const int* budgets) {
    const int b = min(static_cast<int>(threadIdx.x) % 32, batch - 1);
    end = load_l2_int(row_start + b + 1);
    start = load_l2_int(tree_start + b);
    budget = load_l2_int(budgets + b);
  }

  // All lanes of a warp must call this.
  __device__ __forceinline__ RowSequence of_row(int row, const int* row_start, int batch,
                                                const int* tree_start, const int* budgets) const {
    const int lane = threadIdx.x % 32;
    int before = __popc(__ballot_sync(kAllLanes, lane < batch && end <= row));
    if (before < 32) {
      return {before, __shfl_sync(kAllLanes, start, before),
              __shfl_sync(kAllLanes, budget, before)};
    }
#pragma unroll 1
    for (int first = 32; first < batch; first += 32) {
      const int b = first + lane;
      before += __popc(__ballot_sync(kAllLanes, b < batch && row_start[b + 1] <= row));
    }
    if (before >= batch) return {batch, 0, 0};
    return {before, tree_start[before], budgets[before]};
  }
};
