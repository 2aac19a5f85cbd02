// The reduction of a row's segments to its token.
#pragma once

#include "../../_device/ptx.cuh"
#include "config.cuh"
#include "fold.cuh"

constexpr int kVocab = Config::kVocab, kFoldThreads = 256;

// Reduce the folds of a row with a CTA of kFoldThreads. The result is ``folds[0]`` of thread 0;
// other entries are undefined.
__device__ __forceinline__ void fold_row(const float4* workspace_folds, const int* workspace_ids,
                                         Fold (&folds)[kFoldThreads]) {
  pdl_launch_dependents();
  pdl_wait();
  const int row = blockIdx.x;
  // Issue all loads of a thread before the first merge. A merge branches, so later loads would wait
  // for it. SEGMENTS is as large as the number of warps of the GPU, 2095 for GPT-OSS.
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
    // A padding row may hold NaN, so that no score is the best; its token is arbitrary.
    choice[row] = all.token < kVocab ? all.token : 0;
    logprob[row] = all.logit - (all.maximum + logf(all.sum));
  }
}
