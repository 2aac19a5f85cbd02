// The sequence that a row of a launch belongs to.
#pragma once

#include "types.cuh"

// A number of the batch and what two arrays hold of it; the batch's size where the row is of none.
struct RowSequence {
  int index, start, budget;
};

// With whole warps. All loads are issued at once up to 32 sequences; `budget` may be null.
__device__ __forceinline__ RowSequence sequence_of_row(int row, const int* row_start, int batch,
                                                       const int* tree_start, const int* budget) {
  const int lane = threadIdx.x % 32;
  for (int first = 0; first < batch; first += 32) {
    const int b = first + lane;
    const bool real = b < batch;
    const int end = real ? row_start[b + 1] : 0;
    const int start = real ? tree_start[b] : 0;
    const int allowed = real && budget != nullptr ? budget[b] : 0;
    const int before = __popc(__ballot_sync(0xFFFFFFFFu, real && end <= row));
    if (before < 32) {
      return {first + before, __shfl_sync(0xFFFFFFFFu, start, before),
              __shfl_sync(0xFFFFFFFFu, allowed, before)};
    }
  }
  return {batch, 0, 0};
}
