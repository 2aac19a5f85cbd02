// The sequences of a launch that the kernel for few rows processes; another kernel has the others.
//
// Config: FEW_ROWS.
#pragma once

#include "../../_device/types.cuh"
#include "config.cuh"

__device__ __forceinline__ bool is_few(const int* row_start, int sequence) {
  return row_start[sequence + 1] - row_start[sequence] <= Config::kFewRows;
}
