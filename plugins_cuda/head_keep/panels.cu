// HeadKeep for many rows: head_choose/panels.cu, which also writes the logits of restricted rows.
//
//   weight … logits    see kernel.cu
//   workspace_tokens   normalized rows (linear/normed_tokens.cu)
//   workspace_folds … logprob  see kernel.cu
//
// Grids are those of kernel.cu.
#include "../_device/head_panels.cuh"
#include "../head_choose/device/choice.cuh"
#include "../head_choose/device/config.cuh"
#include "../head_choose/device/kept_logits.cuh"
#include "../head_choose/device/panel_folding.cuh"

using Head = HeadOfPanels<Config>;
using Chunks = Head::Chunks;
using Panels = Head::Panels;
constexpr int kColumns = Head::kColumns;
using PanelFolds = PanelFolding<kColumns, Config::kTiles, Config::kWarps, KeptLogits>;
// Whether each of up to 128 rows is restricted; the flags follow the buffers of the folds.
constexpr int kCutBytes = 4 * 128;
static_assert(Config::kSharedBytes == Panels::kBytes + PanelFolds::kBytes + kCutBytes,
              "as the launch says");
static_assert(4 * kColumns <= kCutBytes, "a word per row");

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32, 1)
    head_keep_of_panels(const Head::Units::Stored* weight, const float* temperature,
                        const int* seed, const int* position, const int* top_k, const float* top_p,
                        const float* floor, float* logits, const unsigned char* workspace_tokens,
                        float4* workspace_folds, int* workspace_ids, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ Panels::Barriers barriers;
  __shared__ Sampling sampling[kColumns];
  __shared__ Fold folds[Config::kWarps * Config::kTiles * kColumns];
  pdl_launch_dependents();
  const Chunks chunks(blockIdx.x, gridDim.x);
  const int first_row = blockIdx.y * kColumns;
  const KeptLogits kept{logits + static_cast<int64_t>(first_row) * Config::kVocab,
                        reinterpret_cast<int*>(shared + Panels::kBytes + PanelFolds::kBytes)};
  const PanelFolds folding{sampling,
                           folds,
                           reinterpret_cast<float*>(shared + Panels::kBytes),
                           {workspace_folds, workspace_ids, Config::kSegments},
                           kept,
                           first_row,
                           min(kColumns, rows - first_row)};
  stream_head_panels<Head::Shape, Panels>(
      workspace_tokens + static_cast<int64_t>(blockIdx.y) * Config::kNormedBytes, weight, chunks,
      shared, barriers,
      [&] {
        prepare_folds(sampling, folds, Config::kWarps * Config::kTiles * kColumns, first_row,
                      folding.live, temperature, seed, position);
        kept.prepare({temperature, top_k, top_p, floor}, first_row, folding.live);
      },
      [&](int round, const float (&sums)[Config::kTiles][kColumns / 2]) {
        folding(chunks, round, sums);
      });
}

extern "C" __global__ void __launch_bounds__(kFoldThreads)
    choose_of_folds(const float4* workspace_folds, const int* workspace_ids, int* choice,
                    float* logprob) {
  fold_segments(workspace_folds, workspace_ids, choice, logprob);
}
