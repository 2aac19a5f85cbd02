// RmsHead for many rows, which are panels: logits = rms(x[logit_rows]) · Wᵀ in fp32.
//
//   weight, logits    see kernel.cu
//   workspace_tokens  normalized rows (linear/normed_tokens.cu)
//
// Grid (CTAs over segments of the vocabulary, groups of 8·TOKEN_TILES rows).
#include "../_device/head_panels.cuh"
#include "device/config.cuh"
#include "device/store.cuh"

using Head = HeadOfPanels<Config>;
using Chunks = Head::Chunks;
using Panels = Head::Panels;
constexpr int kColumns = Head::kColumns;
static_assert(Config::kSharedBytes == Panels::kBytes, "as the launch says");

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32, 1)
    rms_head_of_panels(const Head::Units::Stored* weight, float* logits,
                       const unsigned char* workspace_tokens, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ Panels::Barriers barriers;
  pdl_launch_dependents();
  const Chunks chunks(blockIdx.x, gridDim.x);
  const int first_row = blockIdx.y * kColumns;
  const Store store{logits + static_cast<int64_t>(first_row) * kVocab,
                    min(kColumns, rows - first_row)};
  stream_head_panels<Head::Shape, Panels>(
      workspace_tokens + static_cast<int64_t>(blockIdx.y) * Config::kNormedBytes, weight, chunks,
      shared, barriers, [] {},
      [&](int round, const float (&sums)[Config::kTiles][kColumns / 2]) {
#pragma unroll
        for (int t = 0; t < Config::kTiles; ++t) {
          if (chunks.tile(round, t) >= 0) store(chunks.tile(round, t), sums[t]);
        }
      });
}
