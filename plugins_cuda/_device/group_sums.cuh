// The split-K reduction between CTAs. A CTA has a share of the tiles of a weight × a group of K
// slices. It writes the sums of its group to a workspace. When all are written, each CTA of a share
// adds the groups, in order, for its part of the outputs.
#pragma once

#include "cta_barrier.cuh"
#include "small_linear.cuh"

#ifdef SPECBUILD_EMULATE
// Replaces a CtaBarrier if all CTAs have arrived.
struct AllArrived {
  void wait() const {}
  void leave() const {}
};
#endif

// blockIdx.x, read again so that it occupies no register in between.
__device__ __forceinline__ int cta_index() {
#ifdef SPECBUILD_EMULATE
  return blockIdx.x;
#else
  int v;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(v));
  return v;
#endif
}

// kShares CTAs share kTileCount tiles, in each of kGroups groups.
template <int kTileCount, int kGroups_, int kShares_, int kTokenTiles_, int kThreads>
struct GroupSums {
  static constexpr int kGroups = kGroups_, kShares = kShares_, kTokenTiles = kTokenTiles_;
  static constexpr int kMaxTokens = kTokenTiles * kTokensPerTile;
  static constexpr int kTileFloats = kHalfTileBytes / 4;

  int group, share, first_token, tokens;
  int first_tile, last_tile;

  // The grid is (kGroups · kShares, groups of tokens).
  __device__ __forceinline__ explicit GroupSums(int rows) : GroupSums(rows, blockIdx.x) {}
  __device__ __forceinline__ GroupSums(int rows, int cta)
      : group(cta % kGroups),
        share(cta / kGroups),
        first_token(blockIdx.y * kMaxTokens),
        tokens(min(kMaxTokens, rows - first_token)),
        first_tile(kTileCount * share / kShares),
        last_tile(kTileCount * (share + 1) / kShares) {}

  // The offset in ``sums`` [groups of tokens][groups][tiles][kTokenTiles][row of a tile][token].
  __device__ __forceinline__ int64_t sums_at(int from, int tile, int n) const {
    const int64_t at = (static_cast<int64_t>(blockIdx.y) * kGroups + from) * kTileCount + tile;
    return (at * kTokenTiles + n) * kTileFloats;
  }

  // Emit this CTA's part of the outputs, after it has written its sums. For each pair, rows g and g
  // + 8 of a tile for one token, outputs.begin(tile, g, token) returns a value. It is passed to
  // outputs.more(), and then to outputs.end(held, row g, row g + 8). All loads of a round of pairs
  // are issued before the first use, and those of the first round before the wait for other CTAs.
  template <class Outputs>
  __device__ __forceinline__ void emit_all(const float* sums, unsigned* arrived,
                                           const Outputs& outputs) const {
    int* count = reinterpret_cast<int*>(arrived) + blockIdx.y * kShares + share;
#ifdef SPECBUILD_EMULATE
    // The emulator runs CTAs in sequence, so the last one emits all parts.
    __shared__ int last;
    const bool is_last = is_last_of(count, kGroups, &last);
    for (int part = 0; is_last && part < kGroups; ++part) {
      emit_part(part, sums, outputs, AllArrived());
    }
#else
    static_assert(kGroups <= 16, "a group has a slice at least");
    // If a part has fewer places than threads, the last warp has none.
    emit_part(group, sums, outputs, CtaBarrier<kThreads - 1>(count, kGroups));
#endif
  }

  static __device__ __forceinline__ void add_bits(float (&sum)[4], uint4 bits) {
    sum[0] += __uint_as_float(bits.x);
    sum[1] += __uint_as_float(bits.y);
    sum[2] += __uint_as_float(bits.z);
    sum[3] += __uint_as_float(bits.w);
  }

 private:
  // Tokens of a place, and places of 8 tokens of a tile.
  static constexpr int kTokens = 4, kPlacesPerTile = 16;
  static constexpr int kMaxPlaces =
      ceil_div(ceil_div(kTileCount, kShares_) * kTokenTiles * kPlacesPerTile, kGroups* kThreads);
  static constexpr int kPlaces = kThreads > 256 || kMaxPlaces < 2 ? 1 : kMaxPlaces < 3 ? 2 : 3;
  static constexpr int kRounds = ceil_div(kMaxPlaces, kPlaces);

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
    // More if the launch allows a thread more than 128 registers.
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
