// RmsHead: logits = rms(x[logit_rows]) · Wᵀ in fp32, then division and cap (final_logit.cuh).
//
//   x           [T, 32·K_BLOCKS] bf16, in
//   logit_rows  [rows] int32, in
//   norm        [32·K_BLOCKS] bf16, in, constant
//   weight      [TILE_COUNT, K_BLOCKS, 512] bf16, in, constant (linear/packing.py); or the format
//               WEIGHTS (linear/block_scaled.py)
//   logits      [rows, 16·TILE_COUNT] fp32, out
//
// Grid (CTAs over segments of the vocabulary, groups of 8·TOKEN_TILES rows). The weight of GPT-OSS
// has 1.16 GB, 256 µs at 4.53 TB/s; 32000 tokens of a draft have 184 MB, 41 µs. Many rows are
// panels (panels.cu).
#include "../_device/head_stream.cuh"
#include "device/config.cuh"
#include "device/store.cuh"

using Head = HeadOfFew<Config>;
using Units = Head::Units;
using Shape = Head::Shape;
using Chunks = Head::Chunks;
using Fragments = Head::Fragments;

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32, 1)
    rms_head(const uint16_t* x, const int* logit_rows, const uint16_t* norm,
             const Units::Stored* weight, float* logits, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  pdl_launch_dependents();
  const Chunks chunks(blockIdx.x, gridDim.x);
  const int first_row = blockIdx.y * Shape::kMaxTokens;
  const int live = min(Shape::kMaxTokens, rows - first_row);
  const Store store{logits + static_cast<int64_t>(first_row) * kVocab, live};
  stream_head<Shape, Fragments, Head::kRounding>(
      x, logit_rows, norm, weight, chunks, shared, first_row, live,
      static_cast<float>(Config::kEps), [] {}, [](const Fragments&) {},
      [&](int chunk, const float (&sums)[1][Config::kTokenTiles][4]) {
        store(chunks.first_tile(chunk), sums[0][0]);
      });
}
