// Which sequences of a launch go to the kernel for few rows, and which to the one for many.
//
// Config: FEW_ROWS.
#pragma once

#include "../../_device/types.cuh"
#include "config.cuh"

__device__ __forceinline__ bool is_few(const int* row_start, int sequence) {
  return row_start[sequence + 1] - row_start[sequence] <= Config::kFewRows;
}
