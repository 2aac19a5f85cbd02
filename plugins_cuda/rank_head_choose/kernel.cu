// RankHeadChoose: each row's token and its log-probability, with a vocabulary split over ranks.
//
//   x … position       see head_choose/kernel.cu; the weight has the rank's tokens, which follow
//                      those of lower ranks
//   inbox … fault      see rank_sum/kernel.cu
//   choice, logprob    see head_choose/kernel.cu; of the complete vocabulary, on every rank
//   workspace…         see head_choose/kernel.cu
//
// rank_folds streams the weight and reduces segments, as head_folds does. The noise of a token
// depends on its index in the complete vocabulary. choose_of_ranks, one CTA per row, reduces the
// rank's segments, sends 48 bytes to each other rank, and merges the folds it receives. At most 256
// rows.
#include "../head_choose/device/few_rows.cuh"
#include "device/choice_of_ranks.cuh"

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32, 1)
    rank_folds(const uint16_t* x, const int* logit_rows, const uint16_t* norm,
               const Units::Stored* weight, const float* temperature, const int* seed,
               const int* position, float4* workspace_folds, int* workspace_ids, int rows,
               int rank) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ Sampling sampling[Shape::kMaxTokens];
  __shared__ Fold folds[Config::kWarps * Shape::kMaxTokens];
  pdl_launch_dependents();
  const Chunks chunks(blockIdx.x, gridDim.x);
  const int first_row = blockIdx.y * Shape::kMaxTokens;
  const Folding<RankTokens> folding{
      sampling,        folds,     {workspace_folds, workspace_ids, Config::kSegments},
      tokens_of(rank), first_row, min(Shape::kMaxTokens, rows - first_row)};
  stream_head<Shape, Fragments, Head::kRounding>(
      x, logit_rows, norm, weight, chunks, shared, first_row, folding.live,
      static_cast<float>(Config::kEps),
      [&] {
        prepare_folds(sampling, folds, Config::kWarps * Shape::kMaxTokens, first_row, folding.live,
                      temperature, seed, position);
      },
      [](const Fragments&) {},
      [&](int chunk, const float (&sums)[1][Config::kTokenTiles][4]) {
        folding(chunks, chunk, sums);
      });
}
