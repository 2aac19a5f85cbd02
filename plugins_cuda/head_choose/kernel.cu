// HeadChoose: each row's token, by argmax or Gumbel-max, and its log-probability; no logits.
//
//   x                [T, 32·K_BLOCKS] bf16, in
//   logit_rows       [rows] int32, in
//   norm             [32·K_BLOCKS] bf16, in, constant
//   weight           [TILE_COUNT, K_BLOCKS, 512] bf16, in, constant (linear/packing.py); or stored
//                    as WEIGHTS says (linear/block_scaled.py)
//   temperature      [rows] fp32, in; 0 = argmax
//   seed, position   [rows] int32, in
//   workspace_tokens  with STAGES: normed rows, as linear/normed_tokens.cu describes them
//   workspace_folds  [rows, SEGMENTS, 4] fp32: best score, its logit, largest logit, Σ exp
//   workspace_ids    [rows, SEGMENTS] int32: token of the best score
//   choice           [rows] int32, out
//   logprob          [rows] fp32, out
//
// head_folds streams the weight (grid: CTAs over segments, groups of 8·TOKEN_TILES
// rows) and folds each segment of the vocabulary; choose_of_folds, one CTA a row, folds the
// segments. All folds run in an order that is fixed by the vocabulary.
#include "../_device/head_stream.cuh"
#include "../_device/philox.cuh"

using Units = WeightUnits<WEIGHTS>::Units;
using Shape = LinearShape<K_BLOCKS, WARPS, 1, 1, 1, TOKEN_TILES, DEPTH, 0, Units>;
using Chunks = SegmentChunks<SEGMENTS, SEGMENT_TILES, TILE_COUNT, WARPS, STAGES != 0>;
#if STAGES
using Staged = StagedTokens<Shape, STAGES>;
static_assert(SHARED_BYTES == Staged::kBytes, "as the launch says");
#else
using Fragments = TokenFragments<K_BLOCKS, NORM_SLICES, TOKEN_TILES>;
constexpr NormRounding kRounding =
    CAST_FIRST ? NormRounding::kCastFirst : NormRounding::kWeightInFp32;
static_assert(SHARED_BYTES == Fragments::kBytes + Fragments::kNormBytes, "as the launch says");
#endif

constexpr int kVocab = TILE_COUNT * 16, kNoToken = 0x7FFFFFFF, kFoldThreads = 256;

namespace {

__device__ __forceinline__ float minus_infinity() {
  return __uint_as_float(0xFF800000u);
}

// What is known of some of a row's tokens.
struct Fold {
  float score, logit;  // the best score (lowest token on ties) and the logit of that token
  float most, sum;     // the largest logit, and Σ exp(logit − most)
  int token;

  __device__ __forceinline__ void clear() {
    score = logit = most = minus_infinity();
    sum = 0.0f;
    token = kNoToken;
  }

  // Tokens come in rising order, so that the first of equal scores stays.
  __device__ __forceinline__ void add(int new_token, float new_logit, float new_score) {
    if (new_score > score) {
      score = new_score;
      logit = new_logit;
      token = new_token;
    }
    if (new_logit > most) {
      sum = sum * expf(most - new_logit) + 1.0f;
      most = new_logit;
    } else {
      sum += expf(new_logit - most);
    }
  }

  __device__ __forceinline__ void merge(const Fold& other) {
    if (other.score > score || (other.score == score && other.token < token)) {
      score = other.score;
      logit = other.logit;
      token = other.token;
    }
    if (other.most == minus_infinity()) return;
    const float larger_most = fmaxf(most, other.most);
    sum = sum * expf(most - larger_most) + other.sum * expf(other.most - larger_most);
    most = larger_most;
  }

  __device__ __forceinline__ Fold of_lane(int mask) const {
    return {__shfl_xor_sync(0xFFFFFFFFu, score, mask), __shfl_xor_sync(0xFFFFFFFFu, logit, mask),
            __shfl_xor_sync(0xFFFFFFFFu, most, mask), __shfl_xor_sync(0xFFFFFFFFu, sum, mask),
            __shfl_xor_sync(0xFFFFFFFFu, token, mask)};
  }
};

// How a row chooses.
struct Sampling {
  float temperature;
  int seed, position;

  __device__ __forceinline__ float score(float logit, int token) const {
    if (temperature == 0.0f) return logit;
    return logit / temperature + positional_gumbel(seed, position, token);
  }
};

// Folds tiles of the vocabulary for the rows from first_row on. The lanes of a warp join theirs
// tile by tile, so that what is known of a segment is one fold a row, in shared memory.
struct Folding {
  Sampling* sampling;  // [rows]
  Fold* folds;         // [warps, rows]
  float4* workspace_folds;
  int* workspace_ids;
  int first_row, live;

  // Between the wait for the launch in front and a barrier.
  __device__ __forceinline__ void prepare(const float* temperature, const int* seed,
                                          const int* position) const {
    for (int i = threadIdx.x; i < live; i += WARPS * 32) {
      const int row = first_row + i;
      sampling[i] = {load_l2_float(temperature + row), load_l2_int(seed + row),
                     load_l2_int(position + row)};
    }
    for (int i = threadIdx.x; i < WARPS * Shape::kMostTokens; i += WARPS * 32) folds[i].clear();
  }

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
          fold.add(token, sums[0][n][i], how.score(sums[0][n][i], token));
          fold.add(token + 8, sums[0][n][i + 2], how.score(sums[0][n][i + 2], token + 8));
        }
        for (int mask = 4; mask < 32; mask *= 2) fold.merge(fold.of_lane(mask));
        if (row < live && lane < 4) {
          Fold& segment = folds[threadIdx.x / 32 * Shape::kMostTokens + row];
          segment.merge(fold);
          if (ends) store(segment, first_row + row, chunks.segment(chunk));
        }
      }
    }
  }

 private:
  __device__ __forceinline__ void store(Fold& fold, int row, int segment) const {
    const int64_t entry = static_cast<int64_t>(row) * SEGMENTS + segment;
    workspace_folds[entry] = make_float4(fold.score, fold.logit, fold.most, fold.sum);
    workspace_ids[entry] = fold.token;
    fold.clear();
  }
};

}  // namespace

#if STAGES

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    head_folds_of_many(const Units::Stored* weight, const float* temperature, const int* seed,
                       const int* position, const unsigned char* workspace_tokens,
                       float4* workspace_folds, int* workspace_ids, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ Staged::Barriers barriers;
  __shared__ Sampling sampling[Shape::kMostTokens];
  __shared__ Fold folds[WARPS * Shape::kMostTokens];
  pdl_launch_dependents();
  const Chunks chunks(blockIdx.x, gridDim.x);
  const int first_row = blockIdx.y * Shape::kMostTokens;
  const Folding folding{sampling,      folds,     workspace_folds,
                        workspace_ids, first_row, min(Shape::kMostTokens, rows - first_row)};
  stream_head_staged<Staged, Shape>(
      workspace_tokens + static_cast<int64_t>(blockIdx.y) * NORMED_BYTES, weight, chunks, shared,
      barriers, [&] { folding.prepare(temperature, seed, position); },
      [&](int chunk, const float (&sums)[1][TOKEN_TILES][4]) { folding(chunks, chunk, sums); });
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
  const Folding folding{sampling,      folds,     workspace_folds,
                        workspace_ids, first_row, min(Shape::kMostTokens, rows - first_row)};
  stream_head<Shape, Fragments, kRounding>(
      x, logit_rows, norm, weight, chunks, shared, first_row, folding.live, static_cast<float>(EPS),
      [&] { folding.prepare(temperature, seed, position); },
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
  Fold fold;
  fold.clear();
  for (int segment = threadIdx.x; segment < SEGMENTS; segment += kFoldThreads) {
    const int64_t entry = static_cast<int64_t>(row) * SEGMENTS + segment;
    const uint4 bits = load_l2_16(workspace_folds + entry);
    fold.merge({__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z),
                __uint_as_float(bits.w), load_l2_int(workspace_ids + entry)});
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
