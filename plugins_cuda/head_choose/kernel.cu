// HeadChoose: each row's token by argmax or Gumbel-max, and its log-probability, without writing
// the logits. These are the sums after division and cap (final_logit.cuh).
//
//   x                [T, 32·K_BLOCKS] bf16, in
//   logit_rows       [rows] int32, in
//   norm             [32·K_BLOCKS] bf16, in, constant
//   weight           [TILE_COUNT, K_BLOCKS, 512] bf16, in, constant (linear/packing.py); or the
//                    format WEIGHTS (linear/block_scaled.py)
//   temperature      [rows] fp32, in; 0 = argmax
//   seed, position   [rows] int32, in
//   workspace_folds  [rows, SEGMENTS, 4] fp32: best score, its logit, largest logit, Σ exp
//   workspace_ids    [rows, SEGMENTS] int32: token of the best score
//   choice           [rows] int32, out
//   logprob          [rows] fp32, out
//
// head_folds streams the weight and reduces each segment of the vocabulary to a fold. Its grid is
// (CTAs over segments, groups of 8·TOKEN_TILES rows). choose_of_folds, one CTA per row, reduces the
// segments. The order of all reductions depends on the vocabulary only. Many rows are panels
// (panels.cu).
#include "device/choice.cuh"
#include "device/few_rows.cuh"
#include "device/kept_logits.cuh"

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32, 1)
    head_folds(const uint16_t* x, const int* logit_rows, const uint16_t* norm,
               const Units::Stored* weight, const float* temperature, const int* seed,
               const int* position, float4* workspace_folds, int* workspace_ids, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ Sampling sampling[Shape::kMaxTokens];
  __shared__ Fold folds[Config::kWarps * Shape::kMaxTokens];
  pdl_launch_dependents();
  const Chunks chunks(blockIdx.x, gridDim.x);
  const int first_row = blockIdx.y * Shape::kMaxTokens;
  const Folding<NoLogits> folding{
      sampling, folds,     {workspace_folds, workspace_ids, Config::kSegments},
      {},       first_row, min(Shape::kMaxTokens, rows - first_row)};
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

extern "C" __global__ void __launch_bounds__(kFoldThreads)
    choose_of_folds(const float4* workspace_folds, const int* workspace_ids, int* choice,
                    float* logprob) {
  fold_segments(workspace_folds, workspace_ids, choice, logprob);
}
