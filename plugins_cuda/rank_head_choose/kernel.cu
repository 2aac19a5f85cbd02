// RankHeadChoose: each row's token and its log-probability, of a vocabulary that ranks share.
//
//   x … position       as head_choose/kernel.cu's; the weight has the rank's tokens, which follow
//                      those of the ranks before it
//   inbox … fault      as rank_sum/kernel.cu's
//   choice, logprob    as head_choose/kernel.cu's, of the whole vocabulary, on every rank
//   workspace…         as head_choose/kernel.cu's
//
// rank_folds streams the weight and folds each segment, as head_folds does: noise is that of a
// token's place in the whole vocabulary. choose_of_ranks, one CTA a row, folds the rank's segments,
// sends 48 bytes to each other rank, and merges what it has from them. At most 256 rows.
#include "../head_choose/device/few_rows.cuh"
#include "device/choice_of_ranks.cuh"

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32, 1)
    rank_folds(const uint16_t* x, const int* logit_rows, const uint16_t* norm,
               const Units::Stored* weight, const float* temperature, const int* seed,
               const int* position, float4* workspace_folds, int* workspace_ids, int rows,
               int rank) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ Sampling sampling[Shape::kMostTokens];
  __shared__ Fold folds[Config::kWarps * Shape::kMostTokens];
  pdl_launch_dependents();
  const Chunks chunks(blockIdx.x, gridDim.x);
  const int first_row = blockIdx.y * Shape::kMostTokens;
  const Folding<RankTokens> folding{
      sampling,        folds,     {workspace_folds, workspace_ids, Config::kSegments},
      tokens_of(rank), first_row, min(Shape::kMostTokens, rows - first_row)};
  stream_head<Shape, Fragments, Head::kRounding>(
      x, logit_rows, norm, weight, chunks, shared, first_row, folding.live,
      static_cast<float>(Config::kEps),
      [&] {
        prepare_folds(sampling, folds, Config::kWarps * Shape::kMostTokens, first_row, folding.live,
                      temperature, seed, position);
      },
      [](const Fragments&) {},
      [&](int chunk, const float (&sums)[1][Config::kTokenTiles][4]) {
        folding(chunks, chunk, sums);
      });
}
