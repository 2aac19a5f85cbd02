// RankHeadChoose for many rows, which are panels: head_choose/panels.cu for the tokens of a rank.
// The arguments are those of kernel.cu.
#include "../_device/head_panels.cuh"
#include "../head_choose/device/panel_folding.cuh"
#include "device/choice_of_ranks.cuh"

using Head = HeadOfPanels<Config>;
using Chunks = Head::Chunks;
using Panels = Head::Panels;
constexpr int kColumns = Head::kColumns;
using PanelFolds = PanelFolding<kColumns, Config::kTiles, Config::kWarps, RankTokens>;
static_assert(Config::kSharedBytes == Panels::kBytes + PanelFolds::kBytes, "as the launch says");

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32, 1)
    rank_folds_of_panels(const Head::Units::Stored* weight, const float* temperature,
                         const int* seed, const int* position,
                         const unsigned char* workspace_tokens, float4* workspace_folds,
                         int* workspace_ids, int rows, int rank) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ Panels::Barriers barriers;
  __shared__ Sampling sampling[kColumns];
  __shared__ Fold folds[Config::kWarps * Config::kTiles * kColumns];
  pdl_launch_dependents();
  const Chunks chunks(blockIdx.x, gridDim.x);
  const int first_row = blockIdx.y * kColumns;
  const PanelFolds folding{sampling,
                           folds,
                           reinterpret_cast<float*>(shared + Panels::kBytes),
                           {workspace_folds, workspace_ids, Config::kSegments},
                           tokens_of(rank),
                           first_row,
                           min(kColumns, rows - first_row)};
  stream_head_panels<Head::Shape, Panels>(
      workspace_tokens + static_cast<int64_t>(blockIdx.y) * Config::kNormedBytes, weight, chunks,
      shared, barriers,
      [&] {
        prepare_folds(sampling, folds, Config::kWarps * Config::kTiles * kColumns, first_row,
                      folding.live, temperature, seed, position);
      },
      [&](int round, const float (&sums)[Config::kTiles][kColumns / 2]) {
        folding(chunks, round, sums);
      });
}
