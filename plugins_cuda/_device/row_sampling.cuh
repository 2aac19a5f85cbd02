// The score of a token for argmax or Gumbel-max sampling of a row.
#pragma once

#include "philox.cuh"
#include "ptx.cuh"

// The sampling parameters of a row.
struct Sampling {
  float temperature;
  int seed, position;

  __device__ __forceinline__ bool is_greedy() const {
    return temperature == 0.0f;
  }
  __device__ __forceinline__ float score(float logit, int token) const {
    if (is_greedy()) return logit;
    return noisy(logit, positional_gumbel(seed, position, token));
  }
  __device__ __forceinline__ float noisy(float logit, float noise) const {
    return logit / temperature + noise;
  }
};

// Read the parameters of ``live`` rows from first_row on. Call it after griddepcontrol.wait and
// before a barrier.
__device__ __forceinline__ void prepare_sampling(Sampling* sampling, int first_row, int live,
                                                 const float* temperature, const int* seed,
                                                 const int* position) {
  for (int i = threadIdx.x; i < live; i += blockDim.x) {
    const int row = first_row + i;
    sampling[i] = {load_l2_float(temperature + row), load_l2_int(seed + row),
                   load_l2_int(position + row)};
  }
}
