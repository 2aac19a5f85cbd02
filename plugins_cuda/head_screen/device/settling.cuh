// The tiles whose bounds reach the best, and the best token of theirs; see head_screen/kernel.cu.
#pragma once

#include "../../_device/arrival.cuh"
#include "config.cuh"
#include "screened_row.cuh"

using Head = HeadOfFew<Config>;
using Units = Head::Units;
using Shape = Head::Shape;
using Fragments = Head::Fragments;

// The tiles of a CTA that may hold a row's token, dealt out to its warps.
struct Candidates {
  static constexpr bool kOnlyOne = false;
  const int* tiles;
  int found;

  __device__ __forceinline__ int count() const {
    return ceil_div(max(found - static_cast<int>(threadIdx.x) / 32, 0), Config::kWarps);
  }
  __device__ __forceinline__ int first_tile(int chunk) const {
    return tiles[static_cast<int>(threadIdx.x) / 32 + chunk * Config::kWarps];
  }
  __device__ __forceinline__ bool holds(int pair) const {
    return true;
  }
};

// Lists the tiles of this CTA of which some row's upper bound reaches that row's best lower one.
__device__ __forceinline__ void list_candidates(const float* uppers, const uint32_t* best, int live,
                                                int* tiles, int* found) {
  for (int i = threadIdx.x; i < Config::kCtaTiles; i += Config::kWarps * 32) {
    const int tile = i * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
    if (tile >= Config::kTileCount) break;
    bool reaches = false;
#pragma unroll 8
    for (int row = 0; row < live; ++row) {
      const float upper =
          load_l2_float(uppers + static_cast<int64_t>(row) * Config::kTileCount + tile);
      const uint32_t least =
          static_cast<uint32_t>(load_l2_int(reinterpret_cast<const int*>(best) + row));
      reaches |= upper > minus_infinity() && ordered_key(upper) >= least;
    }
    if (reaches) tiles[atomicAdd(found, 1)] = tile;
  }
}

// The best token of each row among a tile's, if it is the best so far.
struct Settling {
  const Candidates& candidates;
  const Sampling* sampling;  // [rows]
  unsigned long long* keys;
  int live;
  int first_token;  // of the weight, in the whole vocabulary

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
        key = most_of_tokens(key);
        if (row < live && lane < 4) atomicMax(keys + row, static_cast<unsigned long long>(key));
      }
    }
  }

 private:
  // NaN is never the best.
  static __device__ __forceinline__ uint64_t key_of(float score, int token) {
    return score == score ? ranked_key(ordered_key(score), static_cast<uint32_t>(token)) : 0;
  }
};

// A row's token and what stands for its log-probability, by its key.
__device__ __forceinline__ void write_choice(uint64_t key, int* choice, float* logprob) {
  // A padding row may hold NaN, and any token will do for it.
  *choice = key == 0 ? 0 : static_cast<int>(ranked_index(key));
  *logprob = key == 0 ? __uint_as_float(0x7FC00000u) : -minus_infinity();
}

// All of the launch; ``first_token`` is the weight's first token. The last CTA of a group of rows
// calls ``end(row, key)`` once a row, by one thread each, with the key of the weight's best token.
template <class End>
__device__ __forceinline__ void settle_candidates(
    const uint16_t* x, const int* logit_rows, const uint16_t* norm, const Units::Stored* weight,
    const float* temperature, const int* seed, const int* position, const float* workspace_uppers,
    uint32_t* workspace_best, unsigned long long* workspace_keys, int* workspace_arrived, int rows,
    int first_token, End&& end) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ Sampling sampling[Shape::kMostTokens];
  __shared__ int tiles[Config::kCtaTiles];
  __shared__ int found, last;
  pdl_launch_dependents();
  const int first_row = blockIdx.y * Shape::kMostTokens;
  const int live = min(Shape::kMostTokens, rows - first_row);
  if (threadIdx.x == 0) found = 0;
  __syncthreads();
  pdl_wait();
  list_candidates(workspace_uppers + static_cast<int64_t>(first_row) * Config::kTileCount,
                  workspace_best + first_row, live, tiles, &found);
  __syncthreads();
  if (found > 0) {
    const Candidates candidates{tiles, found};
    const Settling settling{candidates, sampling, workspace_keys + first_row, live, first_token};
    stream_head<Shape, Fragments, Head::kRounding>(
        x, logit_rows, norm, weight, candidates, shared, first_row, live,
        static_cast<float>(Config::kEps),
        [&] { prepare_sampling(sampling, first_row, live, temperature, seed, position); },
        [](const Fragments&) {},
        [&](int chunk, const float (&sums)[1][Config::kTokenTiles][4]) { settling(chunk, sums); });
  }
  if (!is_last_of(workspace_arrived + blockIdx.y, gridDim.x, &last)) return;
  for (int i = threadIdx.x; i < live; i += Config::kWarps * 32) {
    const int row = first_row + i;
    const unsigned long long key = atomicExch(workspace_keys + row, 0ull);
    workspace_best[row] = 0;
    end(row, key);
  }
}
