// Exact logits of the candidate tiles, and the best token; see head_screen/kernel.cu.
#pragma once

#include "../../_device/arrival.cuh"
#include "config.cuh"
#include "screened_row.cuh"

using Head = HeadOfFew<Config>;
using Units = Head::Units;
using Shape = Head::Shape;
using Fragments = Head::Fragments;

// The candidate tiles of a CTA, distributed over its warps.
struct Candidates {
  static constexpr bool kOnlyOne = false;
  const int* tiles;
  int size;

  __device__ __forceinline__ int count() const {
    return ceil_div(max(size - static_cast<int>(threadIdx.x) / 32, 0), Config::kWarps);
  }
  __device__ __forceinline__ int first_tile(int chunk) const {
    return tiles[static_cast<int>(threadIdx.x) / 32 + chunk * Config::kWarps];
  }
  __device__ __forceinline__ bool holds(int pair) const {
    return true;
  }
};

// List the tiles of this CTA in which the upper bound of some row reaches the best lower bound of
// that row.
__device__ __forceinline__ void list_candidates(const float* uppers, const uint32_t* best, int live,
                                                int* tiles, int* num_candidates) {
  for (int i = threadIdx.x; i < Config::kCtaTiles; i += Config::kWarps * 32) {
    const int tile = i * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
    if (tile >= Config::kTileCount) break;
    bool reaches = false;
#pragma unroll 8
    for (int row = 0; row < live; ++row) {
      const float upper =
          load_l2_float(uppers + static_cast<int64_t>(row) * Config::kTileCount + tile);
      const uint32_t lower_bound =
          static_cast<uint32_t>(load_l2_int(reinterpret_cast<const int*>(best) + row));
      reaches |= upper > minus_infinity() && ordered_key(upper) >= lower_bound;
    }
    if (reaches) tiles[atomicAdd(num_candidates, 1)] = tile;
  }
}

// Updates the best token of each row with the tokens of a tile.
struct ExactTiles {
  const Candidates& candidates;
  const Sampling* sampling;  // [rows]
  unsigned long long* keys;
  int live;
  int first_token;  // of the weight, in the complete vocabulary

  __device__ __forceinline__ void operator()(int chunk,
                                             const float (&sums)[1][Config::kTokenTiles][4]) const {
    const int lane = threadIdx.x % 32;
    const int token = first_token + candidates.first_tile(chunk) * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < Config::kTokenTiles; ++n) {
      if (n * kTokensPerTile >= live) break;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = n * kTokensPerTile + lane % 4 * 2 + i;
        uint64_t key = 0;
        if (row < live) {
          const Sampling how = sampling[row];
          const float low_logit = logit_of<Config>(token, final_logit<Config>(sums[0][n][i]));
          const float high_logit =
              logit_of<Config>(token + 8, final_logit<Config>(sums[0][n][i + 2]));
          key = key_of(how.score(low_logit, token), token);
          const uint64_t high = key_of(how.score(high_logit, token + 8), token + 8);
          key = key < high ? high : key;
        }
        key = max_over_tokens(key);
        if (row < live && lane < 4) atomicMax(keys + row, static_cast<unsigned long long>(key));
      }
    }
  }

 private:
  // NaN is never the best score.
  static __device__ __forceinline__ uint64_t key_of(float score, int token) {
    return score == score ? ranked_key(ordered_key(score), static_cast<uint32_t>(token)) : 0;
  }
};

// Write the token of a row; its log-probability is infinite, because it is not computed.
__device__ __forceinline__ void write_choice(uint64_t key, int* choice, float* logprob) {
  // A padding row may hold NaN; its token is arbitrary.
  *choice = key == 0 ? 0 : static_cast<int>(ranked_index(key));
  *logprob = key == 0 ? __uint_as_float(0x7FC00000u) : -minus_infinity();
}

// The body of the launch; ``first_token`` is the first token of the weight. The last CTA of a group
// of rows calls ``end(row, key)`` once per row, from one thread, with the key of the weight's best
// token.
template <class End>
__device__ __forceinline__ void choose_candidate(
    const uint16_t* x, const int* logit_rows, const uint16_t* norm, const Units::Stored* weight,
    const float* temperature, const int* seed, const int* position, const float* workspace_uppers,
    uint32_t* workspace_best, unsigned long long* workspace_keys, int* workspace_arrived, int rows,
    int first_token, End&& end) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ Sampling sampling[Shape::kMaxTokens];
  __shared__ int tiles[Config::kCtaTiles];
  __shared__ int num_candidates, last;
  pdl_launch_dependents();
  const int first_row = blockIdx.y * Shape::kMaxTokens;
  const int live = min(Shape::kMaxTokens, rows - first_row);
  if (threadIdx.x == 0) num_candidates = 0;
  __syncthreads();
  pdl_wait();
  list_candidates(workspace_uppers + static_cast<int64_t>(first_row) * Config::kTileCount,
                  workspace_best + first_row, live, tiles, &num_candidates);
  __syncthreads();
  if (num_candidates > 0) {
    const Candidates candidates{tiles, num_candidates};
    const ExactTiles exact_tiles{candidates, sampling, workspace_keys + first_row, live,
                                 first_token};
    stream_head<Shape, Fragments, Head::kRounding>(
        x, logit_rows, norm, weight, candidates, shared, first_row, live,
        static_cast<float>(Config::kEps),
        [&] { prepare_sampling(sampling, first_row, live, temperature, seed, position); },
        [](const Fragments&) {},
        [&](int chunk, const float (&sums)[1][Config::kTokenTiles][4]) {
          exact_tiles(chunk, sums);
        });
  }
  if (!is_last_of(workspace_arrived + blockIdx.y, gridDim.x, &last)) return;
  for (int i = threadIdx.x; i < live; i += Config::kWarps * 32) {
    const int row = first_row + i;
    const unsigned long long key = atomicExch(workspace_keys + row, 0ull);
    workspace_best[row] = 0;
    end(row, key);
  }
}
