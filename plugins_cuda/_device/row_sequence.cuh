// Which sequence a row of a launch is of.
#pragma once

#include "types.cuh"

// `batch` where it is of none; with whole warps.
__device__ __forceinline__ int sequence_of(const int* row_start, int row, int batch) {
  const int lane = threadIdx.x % 32;
  int before = 0;
  for (int first = 0; first < batch; first += 32) {
    const int b = first + lane;
    before += __popc(__ballot_sync(0xFFFFFFFFu, b < batch && row_start[b + 1] <= row));
  }
  return before;
}

#ifdef FEW_ROWS
// Whether a sequence has so few rows that a kernel of its own attends for them.
__device__ __forceinline__ bool is_few(const int* row_start, int sequence) {
  return row_start[sequence + 1] - row_start[sequence] <= FEW_ROWS;
}
#endif
