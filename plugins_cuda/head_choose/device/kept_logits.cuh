// Whether a head also stores logits: none, or those of the rows that ChooseCut restricts. With
// kIsPart the weight has a part of the vocabulary, from token ``first`` on.
#pragma once

#include "../../_device/final_logit.cuh"
#include "../../_device/row_cut.cuh"
#include "../../_device/types.cuh"
#include "config.cuh"

struct NoLogits {
  static constexpr bool kIsPart = false;
  __device__ __forceinline__ bool wants(int row) const {
    return false;
  }
  __device__ __forceinline__ void put(int row, int token, float logit) const {}
};

struct KeptLogits {
  static constexpr bool kIsPart = false;
  float* logits;  // [rows of the CTA, kVocab]
  int* is_cut;    // [rows of the CTA], in shared memory

  // Call it after griddepcontrol.wait and before a barrier.
  __device__ __forceinline__ void prepare(const RowCuts& cuts, int first_row, int live) const {
    for (int i = threadIdx.x; i < live; i += blockDim.x) is_cut[i] = cuts.of(first_row + i);
  }
  __device__ __forceinline__ bool wants(int row) const {
    return is_cut[row] != 0;
  }
  __device__ __forceinline__ void put(int row, int token, float logit) const {
    if (kPads<Config> && token >= Config::kVocab) return;
    logits[static_cast<int64_t>(row) * Config::kVocab + token] = logit;
  }
};
