// The result of a subset of a row's tokens, for a choice by argmax or Gumbel-max.
#pragma once

#include "../../_device/infinity.cuh"
#include "../../_device/row_sampling.cuh"

constexpr int kNoToken = 0x7FFFFFFF;

struct Fold {
  float score, logit;  // the best score (lowest token on ties) and the logit of that token
  float maximum, sum;  // the largest logit, and Σ exp(logit − maximum)
  int token;

  __device__ __forceinline__ void clear() {
    score = logit = maximum = minus_infinity();
    sum = 0.0f;
    token = kNoToken;
  }

  // The fold of two tokens; the first, which is lower, wins ties.
  static __device__ __forceinline__ Fold of_two(int low_token, float low_logit, float low_score,
                                                int high_token, float high_logit,
                                                float high_score) {
    Fold fold;
    fold.clear();
    fold.choose(low_token, low_logit, low_score);
    fold.choose(high_token, high_logit, high_score);
    fold.maximum = fmaxf(low_logit, high_logit);
    fold.sum = 1.0f + expf(-fabsf(low_logit - high_logit));
    return fold;
  }

  // The result has the same bits regardless of which of two folds is merged into the other.
  __device__ __forceinline__ void merge(const Fold& other) {
    if (other.score > score || (other.score == score && other.token < token)) {
      score = other.score;
      logit = other.logit;
      token = other.token;
    }
    if (other.maximum == minus_infinity()) return;
    // Rescale the sum of the fold with the smaller maximum.
    const float rescale = expf(-fabsf(maximum - other.maximum));
    if (other.maximum > maximum) {
      sum = sum * rescale + other.sum;
      maximum = other.maximum;
    } else {
      sum += other.sum * rescale;
    }
  }

  __device__ __forceinline__ Fold of_lane(int mask) const {
    return {__shfl_xor_sync(kAllLanes, score, mask), __shfl_xor_sync(kAllLanes, logit, mask),
            __shfl_xor_sync(kAllLanes, maximum, mask), __shfl_xor_sync(kAllLanes, sum, mask),
            __shfl_xor_sync(kAllLanes, token, mask)};
  }

 private:
  __device__ __forceinline__ void choose(int new_token, float new_logit, float new_score) {
    if (!(new_score > score)) return;
    score = new_score;
    logit = new_logit;
    token = new_token;
  }
};

// Read the sampling parameters of ``live`` rows from first_row on, and clear ``count`` folds. Call
// it after griddepcontrol.wait and before a barrier.
__device__ __forceinline__ void prepare_folds(Sampling* sampling, Fold* folds, int count,
                                              int first_row, int live, const float* temperature,
                                              const int* seed, const int* position) {
  prepare_sampling(sampling, first_row, live, temperature, seed, position);
  for (int i = threadIdx.x; i < count; i += blockDim.x) folds[i].clear();
}

// The output of segments: workspace_folds and workspace_ids of choose_of_folds.
struct SegmentFolds {
  float4* folds;
  int* ids;
  int segments;

  // Store the fold of a segment, and clear it.
  __device__ __forceinline__ void store(Fold& fold, int row, int segment) const {
    const int64_t entry = static_cast<int64_t>(row) * segments + segment;
    folds[entry] = make_float4(fold.score, fold.logit, fold.maximum, fold.sum);
    ids[entry] = fold.token;
    fold.clear();
  }
};
