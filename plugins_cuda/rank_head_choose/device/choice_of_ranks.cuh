// The reduction over ranks: from the folds of a row to its token, on every rank.
#pragma once

#include "../../_device/rank_exchange.cuh"
#include "../../head_choose/device/choice.cuh"
#include "../../head_choose/device/kept_logits.cuh"

using Exchange = RankExchange<Config::kRanks, Config::kWords>;

// The tokens of a rank follow those of lower ranks.
struct RankTokens : NoLogits {
  static constexpr bool kIsPart = true;
  int first;
};

__device__ __forceinline__ RankTokens tokens_of(int rank) {
  RankTokens tokens;
  tokens.first = rank * kVocab;
  return tokens;
}

// A fold as three pairs of words.
constexpr int kFoldPairs = 3;

__device__ __forceinline__ float2 pair_of(const Fold& fold, int i) {
  if (i == 0) return make_float2(fold.score, fold.logit);
  if (i == 1) return make_float2(fold.maximum, fold.sum);
  return make_float2(__int_as_float(fold.token), 0.0f);
}

__device__ __forceinline__ Fold fold_of(const float2 (&pairs)[kFoldPairs]) {
  return {pairs[0].x, pairs[0].y, pairs[1].x, pairs[1].y, __float_as_int(pairs[2].x)};
}

// Merge the folds of all ranks with a CTA of kFoldThreads per row; all CTAs are resident. The order
// is that of the ranks, so that sums have the same bits on each.
__device__ __forceinline__ void choose_among_ranks(const Exchange& peers, const Fold& own,
                                                   int* choice, float* logprob) {
  __shared__ float2 pairs[Config::kRanks][kFoldPairs];
  const int row = blockIdx.x, i = threadIdx.x;
  const uint32_t number = peers.number(0);
  if (i < kFoldPairs) {
    const int place = 2 * (row * kFoldPairs + i);
    const float2 mine = pair_of(own, i);
    peers.push(number, place, mine);
    pairs[peers.rank][i] = mine;
#pragma unroll
    for (int k = 0; k < Exchange::kPeers; ++k) {
      pairs[(peers.rank + k + 1) % Config::kRanks][i] =
          peers.wait(peers.load(number, k, place), number, k, place);
    }
  }
  __syncthreads();
  if (i > 0) return;
  Fold all = fold_of(pairs[0]);
#pragma unroll
  for (int r = 1; r < Config::kRanks; ++r) all.merge(fold_of(pairs[r]));
  // See fold_segments().
  choice[row] = all.token < Config::kRanks * kVocab ? all.token : 0;
  logprob[row] = all.logit - (all.maximum + logf(all.sum));
}

// Both kernel files of this op launch it last: one CTA per row.
extern "C" __global__ void __launch_bounds__(kFoldThreads)
    choose_of_ranks(uint64_t* inbox, uint64_t* inbox_on_1, uint64_t* inbox_on_2,
                    uint64_t* inbox_on_3, uint64_t* inbox_on_4, uint64_t* inbox_on_5,
                    uint64_t* inbox_on_6, uint64_t* inbox_on_7, const int* state, int* fault,
                    int* choice, float* logprob, const float4* workspace_folds,
                    const int* workspace_ids, int rank, int exchange) {
  __shared__ Fold folds[kFoldThreads];
  fold_row(workspace_folds, workspace_ids, folds);
  const Exchange peers(inbox, inbox_on_1, inbox_on_2, inbox_on_3, inbox_on_4, inbox_on_5,
                       inbox_on_6, inbox_on_7, state, fault, rank, exchange);
  __syncthreads();
  choose_among_ranks(peers, folds[0], choice, logprob);
}
