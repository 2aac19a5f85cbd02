// Whether a row samples from a subset of the tokens.
#pragma once

#include "ptx.cuh"

// The parameters of top-k, top-p and min-p that Choose reads for each row.
struct RowCuts {
  const float* temperature;
  const int* top_k;
  const float* top_p;
  const float* floor;  // null: no min-p

  __device__ __forceinline__ bool of(int row) const {
    return load_l2_float(temperature + row) > 0.0f &&
           (load_l2_int(top_k + row) > 0 || load_l2_float(top_p + row) < 1.0f ||
            (floor != nullptr && load_l2_float(floor + row) < 0.0f));
  }
};
