// Sums of CTAs that split both the rows of a weight and K: a share of its tiles by a group of
// slices of K each. A group's sums go to a workspace; the last CTA of a share's groups adds them in
// order.
#pragma once

#include "small_linear.cuh"

// kShares CTAs share kTileCount tiles; each of kGroups groups has as many.
template <int kTileCount, int kGroups_, int kShares_, int kTokenTiles_, int kThreads>
struct GroupSums {
  static constexpr int kGroups = kGroups_, kShares = kShares_, kTokenTiles = kTokenTiles_;
  static constexpr int kMostTokens = kTokenTiles * kTokensPerTile;
  static constexpr int kTileFloats = kHalfTileBytes / 4;

  int group, share, first_token, tokens;
  int first_tile, last_tile;

  // Grid (kGroups · kShares, groups of tokens).
  __device__ __forceinline__ explicit GroupSums(int rows)
      : group(blockIdx.x % kGroups),
        share(blockIdx.x / kGroups),
        first_token(blockIdx.y * kMostTokens),
        tokens(min(kMostTokens, rows - first_token)),
        first_tile(kTileCount * share / kShares),
        last_tile(kTileCount * (share + 1) / kShares) {}

  // Of ``sums`` [groups of tokens][groups][tiles][kTokenTiles][row of a tile][token].
  __device__ __forceinline__ int64_t sums_at(int from, int tile, int n) const {
    const int64_t at = (static_cast<int64_t>(blockIdx.y) * kGroups + from) * kTileCount + tile;
    return (at * kTokenTiles + n) * kTileFloats;
  }

  // Once this CTA has written its own sums: true for the last one of the share, for which those of
  // all groups are there.
  __device__ __forceinline__ bool is_last(unsigned* arrived) const {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
      unsigned* counter = arrived + blockIdx.y * kShares + share;
      __threadfence();
      last = atomicAdd(counter, 1u) == kGroups - 1;
      if (last) *counter = 0;
      __threadfence();
    }
    __syncthreads();
    return last;
  }

  // By the last CTA. Of each pair of outputs, rows g and g + 8 of a tile for one token: what
  // outputs.begin(tile, g, token) gives goes through outputs.more() to outputs.end(held, row g,
  // row g + 8). All that a thread's pairs of a round need is on its way before any of it is used.
  template <class Outputs>
  __device__ __forceinline__ void emit_all(const float* sums, const Outputs& outputs) const {
    constexpr int kTokens = 4, kPlaces = kThreads <= 256 ? 3 : 1;
    using Held = decltype(outputs.begin(0, 0, 0));
    const int live_tiles = ceil_div(tokens, kTokensPerTile);
    const int count = (last_tile - first_tile) * live_tiles * 16;
    for (int first = threadIdx.x; first < count; first += kPlaces * kThreads) {
      Place place[kPlaces];
      Held held[kPlaces][kTokens];
#pragma unroll
      for (int p = 0; p < kPlaces; ++p) {
        place[p] = place_of(min(first + p * kThreads, count - 1), live_tiles);
#pragma unroll
        for (int i = 0; i < kTokens; ++i) {
          const int token = min(place[p].token + i, tokens - 1);
          held[p][i] = outputs.begin(place[p].tile, place[p].g, first_token + token);
        }
      }
      float low[kPlaces][kTokens] = {}, high[kPlaces][kTokens] = {};
      add_groups(sums, place, low, high);
#pragma unroll
      for (int p = 0; p < kPlaces; ++p) {
#pragma unroll
        for (int i = 0; i < kTokens; ++i) outputs.more(held[p][i]);
      }
#pragma unroll
      for (int p = 0; p < kPlaces; ++p) {
        if (first + p * kThreads >= count) break;
#pragma unroll
        for (int i = 0; i < kTokens; ++i) {
          if (place[p].token + i < tokens) outputs.end(held[p][i], low[p][i], high[p][i]);
        }
      }
    }
  }

  static __device__ __forceinline__ void add_bits(float (&sum)[4], uint4 bits) {
    sum[0] += __uint_as_float(bits.x);
    sum[1] += __uint_as_float(bits.y);
    sum[2] += __uint_as_float(bits.z);
    sum[3] += __uint_as_float(bits.w);
  }

 private:
  // Rows g and g + 8 of a tile, for four tokens from ``token`` on.
  struct Place {
    int tile, g, token;
  };

  __device__ __forceinline__ Place place_of(int index, int live_tiles) const {
    const int part = index % 16, n = index / 16 % live_tiles, tile = index / 16 / live_tiles;
    return {first_tile + tile, part / 2, n * kTokensPerTile + part % 2 * 4};
  }

  template <int kPlaces>
  __device__ __forceinline__ void add_groups(const float* sums, const Place (&place)[kPlaces],
                                             float (&low)[kPlaces][4],
                                             float (&high)[kPlaces][4]) const {
    constexpr int kAtOnce = 4;
#pragma unroll
    for (int group = 0; group < kGroups; group += kAtOnce) {
      uint4 bits[kAtOnce][kPlaces][2];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (group + i >= kGroups) break;
#pragma unroll
        for (int p = 0; p < kPlaces; ++p) {
          const Place& at = place[p];
          const float* from = sums + sums_at(group + i, at.tile, at.token / kTokensPerTile) +
                              at.g * kTokensPerTile + at.token % kTokensPerTile;
          bits[i][p][0] = load_l2_16(from);
          bits[i][p][1] = load_l2_16(from + kTileFloats / 2);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (group + i >= kGroups) break;
#pragma unroll
        for (int p = 0; p < kPlaces; ++p) {
          add_bits(low[p], bits[i][p][0]);
          add_bits(high[p], bits[i][p][1]);
        }
      }
    }
  }
};
