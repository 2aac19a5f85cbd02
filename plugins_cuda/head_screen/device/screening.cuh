// Bounds of each tile's scores from int8 weights; see head_screen/screen.cu.
#pragma once

#include "config.cuh"
#include "screened_row.cuh"

using Head = HeadOfFew<Config>;
using Units = Head::Units;
using Shape = Head::Shape;
using Chunks = Head::Chunks;
using Fragments = Head::Fragments;

// More than the relative error of a length in fp32.
constexpr float kLengthSlack = 1.0f + 1.0f / 1024.0f;

// More than the difference of two logits whose order the cap can reverse, because tanh is rounded.
constexpr float kCapSlack = Config::kLogitCap * 0x1p-20f;

// Whether the best lower bounds are in shared memory, one per warp and row. With 32 rows a CTA has
// too few registers for one per lane and row.
constexpr bool kSharedLowers = Config::kTokenTiles > 2;
constexpr int kSharedLowerCount = kSharedLowers ? Config::kWarps * Shape::kMaxTokens : 1;

// Computes bounds of a warp's tiles for the rows from first_row on, one tile after the other. With
// ``is_part`` the weight has a part of the vocabulary.
template <bool is_part>
struct Screening {
  const Chunks& chunks;
  const Sampling* sampling;  // [rows]
  const float* squares;      // of rows, see TokenFragments::add_squares()
  const float* errors;
  float* uppers;
  uint32_t* best;
  int live;
  float* shared_lowers;  // [kSharedLowerCount]
  int first_token;       // of the weight, in the whole vocabulary; 0 unless ``is_part``
  // The errors of this lane's two tokens in the next tile.
  float low_error, high_error;
  // The best lower bound of each row so far, over this lane's tokens.
  float lowers[Config::kTokenTiles][2];

  // Constants may be read before the previous launch has finished.
  __device__ __forceinline__ void start() {
    fetch(0);
#pragma unroll
    for (int n = 0; n < Config::kTokenTiles; ++n) {
      lowers[n][0] = lowers[n][1] = minus_infinity();
      // Only the lane that writes a row's bound reads it: no barrier is required.
      if (kSharedLowers && threadIdx.x % 32 < 4) {
#pragma unroll
        for (int i = 0; i < 2; ++i) *shared_lower(row_of(n, i)) = minus_infinity();
      }
    }
  }

  __device__ __forceinline__ void operator()(int chunk,
                                             const float (&sums)[1][Config::kTokenTiles][4]) {
    const int lane = threadIdx.x % 32, tile = chunks.first_tile(chunk);
    const int token = tile * 16 + lane / 4 + (is_part ? first_token : 0);
    const float low_off = low_error, high_off = high_error;
    fetch(chunk + 1);
    const bool ends = chunks.ends_segment(chunk);
#pragma unroll
    for (int n = 0; n < Config::kTokenTiles; ++n) {
      if (n * kTokensPerTile >= live) break;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = row_of(n, i);
        if (kSharedLowers) lowers[n][i] = minus_infinity();
        float upper = minus_infinity();
        if (row < live) {
          const Sampling how = sampling[row];
          const float length =
              sqrtf(Fragments::sum_of(squares + row * Fragments::kSumStride)) * kLengthSlack;
          bound(how, token, sums[0][n][i], low_off * length, upper, lowers[n][i]);
          bound(how, token + 8, sums[0][n][i + 2], high_off * length, upper, lowers[n][i]);
        }
        upper = max_over_tokens(upper);
        if (row < live && lane < 4)
          uppers[static_cast<int64_t>(row) * Config::kTileCount + tile] = upper;
        if (!kSharedLowers && !ends) continue;
        float lower = max_over_tokens(lowers[n][i]);
        if (row < live && lane < 4) {
          if (kSharedLowers) {
            lower = fmaxf(lower, *shared_lower(row));
            *shared_lower(row) = lower;
            if (!ends) continue;
          }
          atomicMax(best + row, ordered_key(lower));
        }
      }
    }
  }

 private:
  // The row of this lane's sums [n][i] and [n][i + 2].
  static __device__ __forceinline__ int row_of(int n, int i) {
    return n * kTokensPerTile + threadIdx.x % 4 * 2 + i;
  }

  // The best lower bound of a row so far, over this warp's tokens.
  __device__ __forceinline__ float* shared_lower(int row) const {
    return shared_lowers + threadIdx.x / 32 * Shape::kMaxTokens + row;
  }

  __device__ __forceinline__ void fetch(int chunk) {
    if (chunk >= chunks.count()) return;
    const float* from = errors + chunks.first_tile(chunk) * 16 + threadIdx.x % 32 / 4;
    low_error = __ldg(from);
    high_error = __ldg(from + 8);
  }

  // NaN does not change the bounds.
  static __device__ __forceinline__ void bound(const Sampling how, int token, float sum, float off,
                                               float& upper, float& lower) {
    if (kPads<Config> && token >= Config::kVocab) return;
    const float noise = how.is_greedy() ? 0.0f : positional_gumbel(how.seed, how.position, token);
    const float upper_logit = final_logit<Config>(sum + off) + kCapSlack;
    const float lower_logit = final_logit<Config>(sum - off) - kCapSlack;
    upper = fmaxf(upper, how.is_greedy() ? upper_logit : how.noisy(upper_logit, noise));
    lower = fmaxf(lower, how.is_greedy() ? lower_logit : how.noisy(lower_logit, noise));
  }
};

// Process the CTA's segments for its rows; ``first_token`` is the first token of the weight.
template <bool is_part>
__device__ __forceinline__ void screen_segments(const uint16_t* x, const int* logit_rows,
                                                const uint16_t* norm, const Units::Stored* codes,
                                                const float* errors, const float* temperature,
                                                const int* seed, const int* position,
                                                float* workspace_uppers, uint32_t* workspace_best,
                                                int rows, int first_token) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ Sampling sampling[Shape::kMaxTokens];
  __shared__ float4 squares[Fragments::kSumBytes / 16];
  __shared__ float lowers[kSharedLowerCount];
  pdl_launch_dependents();
  const Chunks chunks(blockIdx.x, gridDim.x);
  const int first_row = blockIdx.y * Shape::kMaxTokens;
  const int live = min(Shape::kMaxTokens, rows - first_row);
  Screening<is_part> screening{
      chunks,
      sampling,
      reinterpret_cast<const float*>(squares),
      errors,
      workspace_uppers + static_cast<int64_t>(first_row) * Config::kTileCount,
      workspace_best + first_row,
      live,
      lowers,
      first_token};
  screening.start();
  stream_head<Shape, Fragments, Head::kRounding>(
      x, logit_rows, norm, codes, chunks, shared, first_row, live, static_cast<float>(Config::kEps),
      [&] { prepare_sampling(sampling, first_row, live, temperature, seed, position); },
      [&](const Fragments& fragments) { fragments.add_squares(reinterpret_cast<float*>(squares)); },
      [&](int chunk, const float (&sums)[1][Config::kTokenTiles][4]) { screening(chunk, sums); });
}
