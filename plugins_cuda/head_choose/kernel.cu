// HeadChoose: each row's token, by argmax or Gumbel-max, and its log-probability; no logits. These
// are sums that final_logit.cuh divides and caps.
//
//   x                [T, 32·K_BLOCKS] bf16, in
//   logit_rows       [rows] int32, in
//   norm             [32·K_BLOCKS] bf16, in, constant
//   weight           [TILE_COUNT, K_BLOCKS, 512] bf16, in, constant (linear/packing.py); or stored
//                    as WEIGHTS says (linear/block_scaled.py)
//   temperature      [rows] fp32, in; 0 = argmax
//   seed, position   [rows] int32, in
//   workspace_folds  [rows, SEGMENTS, 4] fp32: best score, its logit, largest logit, Σ exp
//   workspace_ids    [rows, SEGMENTS] int32: token of the best score
//   choice           [rows] int32, out
//   logprob          [rows] fp32, out
//
// head_folds streams the weight (grid: CTAs over segments, groups of 8·TOKEN_TILES rows) and folds
// each segment of the vocabulary; choose_of_folds, one CTA a row, folds the segments. All folds run
// in an order that is fixed by the vocabulary. Many rows are panels (panels.cu).
#include "device/choice.cuh"
#include "device/few_rows.cuh"
#include "device/kept_logits.cuh"

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32, 1)
    head_folds(const uint16_t* x, const int* logit_rows, const uint16_t* norm,
               const Units::Stored* weight, const float* temperature, const int* seed,
               const int* position, float4* workspace_folds, int* workspace_ids, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ Sampling sampling[Shape::kMostTokens];
  __shared__ Fold folds[Config::kWarps * Shape::kMostTokens];
  pdl_launch_dependents();
  const Chunks chunks(blockIdx.x, gridDim.x);
  const int first_row = blockIdx.y * Shape::kMostTokens;
  const Folding<NoLogits> folding{
      sampling, folds,     {workspace_folds, workspace_ids, Config::kSegments},
      {},       first_row, min(Shape::kMostTokens, rows - first_row)};
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

extern "C" __global__ void __launch_bounds__(kFoldThreads)
    choose_of_folds(const float4* workspace_folds, const int* workspace_ids, int* choice,
                    float* logprob) {
  fold_segments(workspace_folds, workspace_ids, choice, logprob);
}
