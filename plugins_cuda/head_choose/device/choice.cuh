// The folds of a row's segments become its token.
#pragma once

#include "../../_device/ptx.cuh"
#include "config.cuh"
#include "fold.cuh"

constexpr int kVocab = Config::kVocab, kFoldThreads = 256;

// What is known of a row, by its CTA of kFoldThreads: ``folds[0]`` of thread 0. Behind it the other
// entries are of no use.
__device__ __forceinline__ void fold_row(const float4* workspace_folds, const int* workspace_ids,
                                         Fold (&folds)[kFoldThreads]) {
  pdl_launch_dependents();
  pdl_wait();
  const int row = blockIdx.x;
  // All of a thread's at once (SEGMENTS is as many as the GPU has warps, 2095 for GPT-OSS): a merge
  // branches, and loads behind it would wait for it.
  constexpr int kOwn = ceil_div(Config::kSegments, kFoldThreads);
  uint4 bits[kOwn];
  int ids[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int segment = i * kFoldThreads + static_cast<int>(threadIdx.x);
    if (segment >= Config::kSegments) break;
    const int64_t entry = static_cast<int64_t>(row) * Config::kSegments + segment;
    bits[i] = load_l2_16(workspace_folds + entry);
    ids[i] = load_l2_int(workspace_ids + entry);
  }
  Fold fold;
  fold.clear();
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    if (i * kFoldThreads + static_cast<int>(threadIdx.x) >= Config::kSegments) break;
    fold.merge({__uint_as_float(bits[i].x), __uint_as_float(bits[i].y), __uint_as_float(bits[i].z),
                __uint_as_float(bits[i].w), ids[i]});
  }
  folds[threadIdx.x] = fold;
  for (int half = kFoldThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < half) {
      folds[threadIdx.x].merge(folds[threadIdx.x + half]);
    }
  }
}

// The arguments are those of choose_of_folds.
__device__ __forceinline__ void fold_segments(const float4* workspace_folds,
                                              const int* workspace_ids, int* choice,
                                              float* logprob) {
  __shared__ Fold folds[kFoldThreads];
  fold_row(workspace_folds, workspace_ids, folds);
  if (threadIdx.x == 0) {
    const Fold& all = folds[0];
    const int row = blockIdx.x;
    // No score of a padding row that holds NaN is the best; any token will do for it.
    choice[row] = all.token < kVocab ? all.token : 0;
    logprob[row] = all.logit - (all.most + logf(all.sum));
  }
}
