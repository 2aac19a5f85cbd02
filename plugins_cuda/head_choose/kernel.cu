// HeadChoose: each row's token, by argmax or Gumbel-max, and its log-probability; no logits.
//
//   x                [T, 32·K_BLOCKS] bf16, in
//   logit_rows       [rows] int32, in
//   norm             [32·K_BLOCKS] bf16, in, constant
//   weight           [TILE_COUNT, K_BLOCKS, 512] bf16, in, constant (linear/packing.py); or stored
//                    as WEIGHTS says (linear/block_scaled.py)
//   temperature      [rows] fp32, in; 0 = argmax
//   seed, position   [rows] int32, in
//   workspace_tokens  with PANELS: normed rows, as linear/normed_tokens.cu describes them
//   workspace_folds  [rows, SEGMENTS, 4] fp32: best score, its logit, largest logit, Σ exp
//   workspace_ids    [rows, SEGMENTS] int32: token of the best score
//   choice           [rows] int32, out
//   logprob          [rows] fp32, out
//
// head_folds streams the weight (grid: CTAs over segments, groups of 8·TOKEN_TILES
// rows) and folds each segment of the vocabulary; choose_of_folds, one CTA a row, folds the
// segments. All folds run in an order that is fixed by the vocabulary. Many rows are panels
// that warps share (PANELS).
#include "../_device/head_panels.cuh"
#include "device/panel_folding.cuh"

using Units = WeightUnits<WEIGHTS>::Units;
#if PANELS
constexpr int kColumns = TOKEN_TILES * kTokensPerTile;
using Shape = PanelShape<K_BLOCKS, K_BLOCKS, K_BLOCKS, TILES, kColumns, DEPTH, Units>;
using Chunks = PanelChunks<SEGMENTS, SEGMENT_TILES, TILE_COUNT, WARPS, TILES>;
using Panels = PanelStream<kColumns, Shape::kPanels, STAGES, WARPS>;
using PanelFolds = PanelFolding<kColumns, TILES, WARPS>;
static_assert(SHARED_BYTES == Panels::kBytes + PanelFolds::kBytes, "as the launch says");
#else
using Shape = LinearShape<K_BLOCKS, WARPS, 1, 1, 1, TOKEN_TILES, DEPTH, 0, Units>;
using Chunks = SegmentChunks<SEGMENTS, SEGMENT_TILES, TILE_COUNT, WARPS, false>;
using Fragments = TokenFragments<K_BLOCKS, NORM_SLICES, TOKEN_TILES>;
constexpr NormRounding kRounding =
    CAST_FIRST ? NormRounding::kCastFirst : NormRounding::kWeightInFp32;
static_assert(SHARED_BYTES == Fragments::kBytes + Fragments::kNormBytes, "as the launch says");
#endif

constexpr int kVocab = TILE_COUNT * 16, kFoldThreads = 256;

#if !PANELS

namespace {

// Folds tiles of the vocabulary for the rows from first_row on. The lanes of a warp join theirs
// tile by tile, so that what is known of a segment is one fold a row, in shared memory.
struct Folding {
  Sampling* sampling;  // [rows]
  Fold* folds;         // [warps, rows]
  SegmentFolds out;
  int first_row, live;

  __device__ __forceinline__ void operator()(const Chunks& chunks, int chunk,
                                             const float (&sums)[1][TOKEN_TILES][4]) const {
    const int lane = threadIdx.x % 32, token = chunks.first_tile(chunk) * 16 + lane / 4;
    const bool ends = chunks.ends_segment(chunk);
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n) {
      if (n * kTokensPerTile >= live) break;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = n * kTokensPerTile + lane % 4 * 2 + i;
        Fold fold;
        fold.clear();
        if (row < live) {
          const Sampling how = sampling[row];
          const float low = sums[0][n][i], high = sums[0][n][i + 2];
          fold = Fold::of_two(token, low, how.score(low, token), token + 8, high,
                              how.score(high, token + 8));
        }
        for (int mask = 4; mask < 32; mask *= 2) fold.merge(fold.of_lane(mask));
        if (row < live && lane < 4) {
          Fold& segment = folds[threadIdx.x / 32 * Shape::kMostTokens + row];
          segment.merge(fold);
          if (ends) out.store(segment, first_row + row, chunks.segment(chunk));
        }
      }
    }
  }
};

}  // namespace

#endif

#if PANELS

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    head_folds_of_panels(const Units::Stored* weight, const float* temperature, const int* seed,
                         const int* position, const unsigned char* workspace_tokens,
                         float4* workspace_folds, int* workspace_ids, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ Panels::Barriers barriers;
  __shared__ Sampling sampling[kColumns];
  __shared__ Fold folds[WARPS * TILES * kColumns];
  pdl_launch_dependents();
  const Chunks chunks(blockIdx.x, gridDim.x);
  const int first_row = blockIdx.y * kColumns;
  const PanelFolds folding{sampling,
                           folds,
                           reinterpret_cast<float*>(shared + Panels::kBytes),
                           {workspace_folds, workspace_ids, SEGMENTS},
                           first_row,
                           min(kColumns, rows - first_row)};
  stream_head_panels<Shape, Panels>(
      workspace_tokens + static_cast<int64_t>(blockIdx.y) * NORMED_BYTES, weight, chunks, shared,
      barriers,
      [&] {
        prepare_folds(sampling, folds, WARPS * TILES * kColumns, first_row, folding.live,
                      temperature, seed, position);
      },
      [&](int round, const float (&sums)[TILES][kColumns / 2]) { folding(chunks, round, sums); });
}

#else

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    head_folds(const uint16_t* x, const int* logit_rows, const uint16_t* norm,
               const Units::Stored* weight, const float* temperature, const int* seed,
               const int* position, float4* workspace_folds, int* workspace_ids, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ Sampling sampling[Shape::kMostTokens];
  __shared__ Fold folds[WARPS * Shape::kMostTokens];
  pdl_launch_dependents();
  const Chunks chunks(blockIdx.x, gridDim.x);
  const int first_row = blockIdx.y * Shape::kMostTokens;
  const Folding folding{sampling,
                        folds,
                        {workspace_folds, workspace_ids, SEGMENTS},
                        first_row,
                        min(Shape::kMostTokens, rows - first_row)};
  stream_head<Shape, Fragments, kRounding>(
      x, logit_rows, norm, weight, chunks, shared, first_row, folding.live, static_cast<float>(EPS),
      [&] {
        prepare_folds(sampling, folds, WARPS * Shape::kMostTokens, first_row, folding.live,
                      temperature, seed, position);
      },
      [](const Fragments&) {},
      [&](int chunk, const float (&sums)[1][TOKEN_TILES][4]) { folding(chunks, chunk, sums); });
}

#endif

extern "C" __global__ void __launch_bounds__(kFoldThreads)
    choose_of_folds(const float4* workspace_folds, const int* workspace_ids, int* choice,
                    float* logprob) {
  __shared__ Fold folds[kFoldThreads];
  pdl_launch_dependents();
  pdl_wait();
  const int row = blockIdx.x;
  // All of a thread's at once (SEGMENTS is as many as the GPU has warps, 2095 for GPT-OSS): a merge
  // branches, and loads behind it would wait for it.
  constexpr int kOwn = ceil_div(SEGMENTS, kFoldThreads);
  uint4 bits[kOwn];
  int ids[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int segment = i * kFoldThreads + static_cast<int>(threadIdx.x);
    if (segment >= SEGMENTS) break;
    const int64_t entry = static_cast<int64_t>(row) * SEGMENTS + segment;
    bits[i] = load_l2_16(workspace_folds + entry);
    ids[i] = load_l2_int(workspace_ids + entry);
  }
  Fold fold;
  fold.clear();
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    if (i * kFoldThreads + static_cast<int>(threadIdx.x) >= SEGMENTS) break;
    fold.merge({__uint_as_float(bits[i].x), __uint_as_float(bits[i].y), __uint_as_float(bits[i].z),
                __uint_as_float(bits[i].w), ids[i]});
  }
  folds[threadIdx.x] = fold;
  for (int half = kFoldThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < half) {
      folds[threadIdx.x].merge(folds[threadIdx.x + half]);
    }
  }
  if (threadIdx.x == 0) {
    const Fold& all = folds[0];
    // No score of a padding row that holds NaN is the best; any token will do for it.
    choice[row] = all.token < kVocab ? all.token : 0;
    logprob[row] = all.logit - (all.most + logf(all.sum));
  }
}
