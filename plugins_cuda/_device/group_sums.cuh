// Sums of CTAs that split both the rows of a weight and K: a share of its tiles by a group of
// slices of K each. A group's sums go to a workspace; once they are all there, each CTA of a
// share's groups adds those of its part of the outputs, in order.
#pragma once

#include "meeting.cuh"
#include "small_linear.cuh"

#ifdef SPECBUILD_EMULATE
// In place of a Meeting, where all have been there.
struct EveryoneIsThere {
  void wait() const {}
  void leave() const {}
};
#endif

// blockIdx.x, read again: no register holds it in between.
__device__ __forceinline__ int cta_index() {
#ifdef SPECBUILD_EMULATE
  return blockIdx.x;
#else
  int v;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(v));
  return v;
#endif
}

// kShares CTAs share kTileCount tiles; each of kGroups groups has as many.
template <int kTileCount, int kGroups_, int kShares_, int kTokenTiles_, int kThreads>
struct GroupSums {
  static constexpr int kGroups = kGroups_, kShares = kShares_, kTokenTiles = kTokenTiles_;
  static constexpr int kMostTokens = kTokenTiles * kTokensPerTile;
  static constexpr int kTileFloats = kHalfTileBytes / 4;

  int group, share, first_token, tokens;
  int first_tile, last_tile;

  // Grid (kGroups · kShares, groups of tokens).
  __device__ __forceinline__ explicit GroupSums(int rows) : GroupSums(rows, blockIdx.x) {}
  __device__ __forceinline__ GroupSums(int rows, int cta)
      : group(cta % kGroups),
        share(cta / kGroups),
        first_token(blockIdx.y * kMostTokens),
        tokens(min(kMostTokens, rows - first_token)),
        first_tile(kTileCount * share / kShares),
        last_tile(kTileCount * (share + 1) / kShares) {}

  // Of ``sums`` [groups of tokens][groups][tiles][kTokenTiles][row of a tile][token].
  __device__ __forceinline__ int64_t sums_at(int from, int tile, int n) const {
    const int64_t at = (static_cast<int64_t>(blockIdx.y) * kGroups + from) * kTileCount + tile;
    return (at * kTokenTiles + n) * kTileFloats;
  }

  // Once this CTA has written its own sums: emits its part of the outputs. Of each pair, rows g and
  // g + 8 of a tile for one token, what outputs.begin(tile, g, token) gives goes through
  // outputs.more() to outputs.end(held, row g, row g + 8). All that a thread's pairs of a round
  // need is on its way before any of it is used, and that of the first round while CTAs wait for
  // each other.
  template <class Outputs>
  __device__ __forceinline__ void emit_all(const float* sums, unsigned* arrived,
                                           const Outputs& outputs) const {
    int* count = reinterpret_cast<int*>(arrived) + blockIdx.y * kShares + share;
#ifdef SPECBUILD_EMULATE
    // CTAs run one after the other, so the last one emits for all.
    __shared__ int last;
    const bool is_last = is_last_of(count, kGroups, &last);
    for (int part = 0; is_last && part < kGroups; ++part) {
      emit_part(part, sums, outputs, EveryoneIsThere());
    }
#else
    static_assert(kGroups <= 16, "one for each slice of K at most, so that they fit");
    // Where a part has fewer places than there are threads, the last warp has none.
    emit_part(group, sums, outputs, Meeting<kThreads - 1>(count, kGroups));
#endif
  }

  static __device__ __forceinline__ void add_bits(float (&sum)[4], uint4 bits) {
    sum[0] += __uint_as_float(bits.x);
    sum[1] += __uint_as_float(bits.y);
    sum[2] += __uint_as_float(bits.z);
    sum[3] += __uint_as_float(bits.w);
  }

 private:
  // Of a place, and places of 8 tokens of a tile.
  static constexpr int kTokens = 4, kPlacesPerTile = 16;
  static constexpr int kMostPlaces =
      ceil_div(ceil_div(kTileCount, kShares_) * kTokenTiles * kPlacesPerTile, kGroups* kThreads);
  static constexpr int kPlaces = kThreads > 256 || kMostPlaces < 2 ? 1 : kMostPlaces < 3 ? 2 : 3;
  static constexpr int kRounds = ceil_div(kMostPlaces, kPlaces);

  template <class Outputs, class Others>
  __device__ __forceinline__ void emit_part(int part, const float* sums, const Outputs& outputs,
                                            Others others) const {
    using Held = decltype(outputs.begin(0, 0, 0));
    const int live_tiles = ceil_div(tokens, kTokensPerTile);
    const int count = (last_tile - first_tile) * live_tiles * kPlacesPerTile;
    const int end = count * (part + 1) / kGroups;
    int first = count * part / kGroups + static_cast<int>(threadIdx.x);
    Place place[kPlaces];
    Held held[kPlaces][kTokens];
    const auto begin = [&] {
#pragma unroll
      for (int p = 0; p < kPlaces; ++p) {
        place[p] = place_of(min(first + p * kThreads, count - 1), live_tiles);
#pragma unroll
        for (int i = 0; i < kTokens; ++i) {
          const int token = min(place[p].token + i, tokens - 1);
          held[p][i] = outputs.begin(place[p].tile, place[p].g, first_token + token);
        }
      }
    };
    const auto more = [&] {
#pragma unroll
      for (int p = 0; p < kPlaces; ++p) {
#pragma unroll
        for (int i = 0; i < kTokens; ++i) outputs.more(held[p][i]);
      }
    };
    const auto finish = [&](const float (&low)[kPlaces][kTokens],
                            const float (&high)[kPlaces][kTokens]) {
#pragma unroll
      for (int p = 0; p < kPlaces; ++p) {
        if (first + p * kThreads >= end) break;
#pragma unroll
        for (int i = 0; i < kTokens; ++i) {
          if (place[p].token + i < tokens) outputs.end(held[p][i], low[p][i], high[p][i]);
        }
      }
    };
    if (first < end) {
      begin();
      more();
    }
    others.wait();
    for (bool again = false; first < end; again = true) {
      if (kRounds > 1 && again) begin();
      float low[kPlaces][kTokens] = {}, high[kPlaces][kTokens] = {};
      add_groups(sums, place, low, high);
      if (kRounds > 1 && again) more();
      finish(low, high);
      if (kRounds == 1) break;
      first += kPlaces * kThreads;
    }
    others.leave();
  }

  // Rows g and g + 8 of a tile, for four tokens from ``token`` on.
  struct Place {
    int tile, g, token;
  };

  __device__ __forceinline__ Place place_of(int index, int live_tiles) const {
    const int at = index % kPlacesPerTile, tiles = index / kPlacesPerTile;
    return {first_tile + tiles / live_tiles, at / 2,
            tiles % live_tiles * kTokensPerTile + at % 2 * kTokens};
  }

  template <int kPlaces>
  __device__ __forceinline__ void add_groups(const float* sums, const Place (&place)[kPlaces],
                                             float (&low)[kPlaces][4],
                                             float (&high)[kPlaces][4]) const {
    // More where the launch leaves a thread more than 128 registers.
    constexpr int kAtOnce = kThreads <= 256 && kPlaces < 2 ? 8 : 4;
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
