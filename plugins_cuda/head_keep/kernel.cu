// HeadKeep: head_choose/kernel.cu, which also writes the logits of restricted rows.
//
//   top_k, top_p  [rows] int32 and fp32, in; floor [rows] fp32, in, or null
//   logits        [rows, 16·TILE_COUNT] fp32, out: those of other rows are not written
#include "../head_choose/device/choice.cuh"
#include "../head_choose/device/few_rows.cuh"
#include "../head_choose/device/kept_logits.cuh"

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32, 1)
    head_keep(const uint16_t* x, const int* logit_rows, const uint16_t* norm,
              const Units::Stored* weight, const float* temperature, const int* seed,
              const int* position, const int* top_k, const float* top_p, const float* floor,
              float* logits, float4* workspace_folds, int* workspace_ids, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ Sampling sampling[Shape::kMaxTokens];
  __shared__ Fold folds[Config::kWarps * Shape::kMaxTokens];
  __shared__ int is_cut[Shape::kMaxTokens];
  pdl_launch_dependents();
  const Chunks chunks(blockIdx.x, gridDim.x);
  const int first_row = blockIdx.y * Shape::kMaxTokens;
  const KeptLogits kept{logits + static_cast<int64_t>(first_row) * Config::kVocab, is_cut};
  const Folding<KeptLogits> folding{
      sampling, folds,     {workspace_folds, workspace_ids, Config::kSegments},
      kept,     first_row, min(Shape::kMaxTokens, rows - first_row)};
  stream_head<Shape, Fragments, Head::kRounding>(
      x, logit_rows, norm, weight, chunks, shared, first_row, folding.live,
      static_cast<float>(Config::kEps),
      [&] {
        prepare_folds(sampling, folds, Config::kWarps * Shape::kMaxTokens, first_row, folding.live,
                      temperature, seed, position);
        kept.prepare({temperature, top_k, top_p, floor}, first_row, folding.live);
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
