// RmsHead: logits = rms(x[logit_rows]) · Wᵀ in fp32.
//
//   x           [T, 32·K_BLOCKS] bf16, in
//   logit_rows  [rows] int32, in
//   norm        [32·K_BLOCKS] bf16, in, constant
//   weight      [TILE_COUNT, K_BLOCKS, 512] bf16, in, constant (linear/packing.py); or stored as
//               WEIGHTS says (linear/block_scaled.py)
//   logits      [rows, 16·TILE_COUNT] fp32, out
//   workspace_tokens  with PANELS: normed rows, as linear/normed_tokens.cu describes them
//
// Grid (CTAs over segments of the vocabulary, groups of 8·TOKEN_TILES rows). 1.16 GB for GPT-OSS,
// 256 µs at 4.53 TB/s; a draft's 32000 tokens are 184 MB, 41 µs.
#include "../_device/head_panels.cuh"

using Units = WeightUnits<WEIGHTS>::Units;
#if PANELS
constexpr int kColumns = TOKEN_TILES * kTokensPerTile;
using Shape = PanelShape<K_BLOCKS, K_BLOCKS, K_BLOCKS, TILES, kColumns, DEPTH, Units>;
using Chunks = PanelChunks<SEGMENTS, SEGMENT_TILES, TILE_COUNT, WARPS, TILES>;
using Panels = PanelStream<kColumns, Shape::kPanels, STAGES, WARPS>;
static_assert(SHARED_BYTES == Panels::kBytes, "as the launch says");
#else
using Shape = LinearShape<K_BLOCKS, WARPS, 1, 1, 1, TOKEN_TILES, DEPTH, 0, Units>;
using Chunks = SegmentChunks<SEGMENTS, SEGMENT_TILES, TILE_COUNT, WARPS, false>;
using Fragments = TokenFragments<K_BLOCKS, NORM_SLICES, TOKEN_TILES>;
constexpr NormRounding kRounding =
    CAST_FIRST ? NormRounding::kCastFirst : NormRounding::kWeightInFp32;
static_assert(SHARED_BYTES == Fragments::kBytes + Fragments::kNormBytes, "as the launch says");
#endif

constexpr int kVocab = TILE_COUNT * 16;

namespace {

// Stores a tile's logits of the rows from first_row on.
struct Store {
  float* out;
  int live;

  // sums[4n + i]: row g (i < 2) or g + 8 of the tile for row 8n + 2t + i % 2.
  __device__ __forceinline__ void operator()(int tile, const float* sums) const {
    const int lane = threadIdx.x % 32;
    float* first = out + tile * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = n * 8 + lane % 4 * 2 + i % 2;
        if (row < live) first[static_cast<int64_t>(row) * kVocab + i / 2 * 8] = sums[4 * n + i];
      }
    }
  }
};

}  // namespace

#if PANELS

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    rms_head_of_panels(const Units::Stored* weight, float* logits,
                       const unsigned char* workspace_tokens, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ Panels::Barriers barriers;
  pdl_launch_dependents();
  const Chunks chunks(blockIdx.x, gridDim.x);
  const int first_row = blockIdx.y * kColumns;
  const Store store{logits + static_cast<int64_t>(first_row) * kVocab,
                    min(kColumns, rows - first_row)};
  stream_head_panels<Shape, Panels>(
      workspace_tokens + static_cast<int64_t>(blockIdx.y) * NORMED_BYTES, weight, chunks, shared,
      barriers, [] {},
      [&](int round, const float (&sums)[TILES][kColumns / 2]) {
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
          if (chunks.tile(round, t) >= 0) store(chunks.tile(round, t), sums[t]);
        }
      });
}

#else

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    rms_head(const uint16_t* x, const int* logit_rows, const uint16_t* norm,
             const Units::Stored* weight, float* logits, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  pdl_launch_dependents();
  const Chunks chunks(blockIdx.x, gridDim.x);
  const int first_row = blockIdx.y * Shape::kMostTokens;
  const int live = min(Shape::kMostTokens, rows - first_row);
  const Store store{logits + static_cast<int64_t>(first_row) * kVocab, live};
  stream_head<Shape, Fragments, kRounding>(
      x, logit_rows, norm, weight, chunks, shared, first_row, live, static_cast<float>(EPS), [] {},
      [](const Fragments&) {},
      [&](int chunk, const float (&sums)[1][TOKEN_TILES][4]) {
        store(chunks.first_tile(chunk), sums[0][0]);
      });
}

#endif
