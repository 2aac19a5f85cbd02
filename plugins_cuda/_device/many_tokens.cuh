// Dense layers of many tokens, up to 64 a CTA: weights still stream once, tokens are shared.
//
// What limits it is what an SM takes from L2: its weights and its tokens. A CTA therefore has a
// share of the weight's tiles by one group of K's slices only, so that it reads no more than that
// part of the tokens: QKV's 132 CTAs take 223 KB of weights and 123 KB of tokens each, not 368 KB.
// Warp = (slice of the group, one of kLanes tiles). The group's sums go to a workspace; the last
// CTA of a share's groups adds them in order. The order of additions is that of small_linear.cuh.
#pragma once

#include "small_linear.cuh"

// Tiles of one warp: every kLanes-th of the CTA's run. All warps of a CTA take as many rounds.
template <int kLanes>
struct LaneChunks {
  static constexpr bool kOnlyOne = false;
  int first, last, lane;

  __device__ __forceinline__ int count() const {
    return ceil_div(last - first, kLanes);
  }
  __device__ __forceinline__ int first_tile(int chunk) const {
    return first + chunk * kLanes + lane;
  }
  __device__ __forceinline__ bool holds(int pair) const {
    return pair < last * kPairsPerTile;
  }
};

// kShares CTAs share kTileCount tiles; each of kGroups groups of slices has as many.
template <class Shape_, int kTileCount, int kShares_>
struct ManyTokens {
  using Shape = Shape_;
  static constexpr int kShares = kShares_, kSlices = Shape::kGroupSlices;
  static constexpr int kGroups = Shape::kSlices / kSlices, kLanes = Shape::kWarps / kSlices;
  static constexpr int kBlocks = kSlices * Shape::kSliceBlocks;  // of a group, the last may be less
  static constexpr int kTokenTiles = Shape::kTokenTiles;
  static constexpr int kTokenBytes = kBlocks * kTokenTiles * kFragmentBytes;
  static constexpr int kBytes = kTokenBytes + Shape::kPartialBytes;
  static constexpr int kTileFloats = kHalfTileBytes / 4;
  using Chunks = LaneChunks<kLanes>;
  using Stream = WeightStream<Shape, Chunks>;
  static_assert(Shape::kTiles == 1 && Shape::kWarps % kSlices == 0, "a warp has one tile");

  int group, share, first_token, tokens;
  int first_tile, last_tile;

  // Grid (kGroups · kShares, groups of tokens).
  __device__ __forceinline__ explicit ManyTokens(int rows)
      : group(blockIdx.x % kGroups),
        share(blockIdx.x / kGroups),
        first_token(blockIdx.y * Shape::kMostTokens),
        tokens(min(Shape::kMostTokens, rows - first_token)),
        first_tile(kTileCount * share / kShares),
        last_tile(kTileCount * (share + 1) / kShares) {}

  __device__ __forceinline__ int slice() const {
    return threadIdx.x / 32 % kSlices;
  }
  __device__ __forceinline__ Chunks chunks() const {
    return {first_tile, last_tile, static_cast<int>(threadIdx.x) / 32 / kSlices};
  }
  __device__ __forceinline__ Stream stream(const typename Shape::Units::Stored* weight) const {
    return Stream(weight, chunks(), nullptr, group * kSlices + slice());
  }

  // Starts to fetch this group's part of the tokens: of the rows of ``x``, or of what
  // normed_tokens() left, [groups of tokens][blocks of all groups][kTokenTiles][lane] 16 bytes.
  __device__ __forceinline__ void fetch_rows(unsigned char* shared, const uint16_t* x) const {
    const int lane = threadIdx.x % 32;
    each_fragment([&](int block, int n) {
      const int token = n * kTokensPerTile + lane / 4, column = (group * kBlocks + block) * 32;
      if (token >= tokens || column >= Shape::kBlocks * 32) return;
      cp_async_16(shared + (block * kTokenTiles + n) * kFragmentBytes + lane * 16,
                  x + static_cast<int64_t>(first_token + token) * (Shape::kBlocks * 32) + column +
                      lane % 4 * 8);
    });
  }
  __device__ __forceinline__ void fetch_normed(unsigned char* shared,
                                               const unsigned char* normed) const {
    const unsigned char* from =
        normed + (static_cast<int64_t>(blockIdx.y) * kGroups + group) * kTokenBytes;
    each_fragment([&](int block, int n) {
      const int at = (block * kTokenTiles + n) * kFragmentBytes + threadIdx.x % 32 * 16;
      if (n * kTokensPerTile < tokens) cp_async_16(shared + at, from + at);
    });
  }

  // After the fetch: the group's sums of all tiles go to ``sums`` [groups of tokens][groups][tiles]
  // [kTokenTiles][128]; true for the last CTA of the share, for which all groups' are there.
  __device__ __forceinline__ bool multiply(Stream& stream, unsigned char* shared, float* sums,
                                           unsigned* arrived) const {
    __shared__ bool is_last;
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    SharedTokens<Shape> input{reinterpret_cast<const uint4*>(shared) +
                              slice() * Shape::kSliceBlocks * kTokenTiles * (kFragmentBytes / 16) +
                              threadIdx.x % 32};
    float* partials = reinterpret_cast<float*>(shared + kTokenBytes);
    stream.run(input, [&](int round, const typename Stream::Sums& own) {
      add_group(partials, own, round, sums);
    });
    __syncthreads();
    if (threadIdx.x == 0) {
      unsigned* counter = arrived + blockIdx.y * kShares + share;
      __threadfence();
      is_last = atomicAdd(counter, 1u) == kGroups - 1;
      if (is_last) *counter = 0;
      __threadfence();
    }
    __syncthreads();
    return is_last;
  }

  // By the last CTA: each pair of outputs to emit(tile, g, token, row g, row g + 8).
  template <class Emit>
  __device__ __forceinline__ void emit_all(const float* sums, const Emit& emit) const {
    const int live_tiles = ceil_div(tokens, kTokensPerTile);
    const int count = (last_tile - first_tile) * live_tiles * 16;
    for (int index = threadIdx.x; index < count; index += Shape::kThreads) {
      const int part = index % 16, n = index / 16 % live_tiles, tile = index / 16 / live_tiles;
      float low[4] = {}, high[4] = {};
#pragma unroll 4
      for (int from = 0; from < kGroups; ++from) {
        const float* place = sums + sums_at(from, first_tile + tile, n) + part * 4;
        add_bits(low, load_l2_16(place));
        add_bits(high, load_l2_16(place + kTileFloats / 2));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = n * kTokensPerTile + part % 2 * 4 + i;
        if (token < tokens) emit(first_tile + tile, part / 2, first_token + token, low[i], high[i]);
      }
    }
  }

 private:
  template <class Visit>
  static __device__ __forceinline__ void each_fragment(const Visit& visit) {
#pragma unroll 4
    for (int i = threadIdx.x / 32; i < kBlocks * kTokenTiles; i += Shape::kWarps) {
      visit(i / kTokenTiles, i % kTokenTiles);
    }
  }

  __device__ __forceinline__ int64_t sums_at(int from, int tile, int n) const {
    const int64_t at = (static_cast<int64_t>(blockIdx.y) * kGroups + from) * kTileCount + tile;
    return (at * kTokenTiles + n) * kTileFloats;
  }

  static __device__ __forceinline__ void add_bits(float (&sum)[4], uint4 bits) {
    sum[0] += __uint_as_float(bits.x);
    sum[1] += __uint_as_float(bits.y);
    sum[2] += __uint_as_float(bits.z);
    sum[3] += __uint_as_float(bits.w);
  }

  // The slices of a round's tiles, added in order.
  __device__ __forceinline__ void add_group(float* partials, const float (&own)[1][kTokenTiles][4],
                                            int round, float* sums) const {
    constexpr int kWarpFloats = kTokenTiles * kTileFloats, kWarpVectors = kWarpFloats / 4;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      float2* tile = reinterpret_cast<float2*>(partials + warp * kWarpFloats + n * kTileFloats);
      tile[lane] = make_float2(own[0][n][0], own[0][n][1]);
      tile[32 + lane] = make_float2(own[0][n][2], own[0][n][3]);
    }
    __syncthreads();
    const uint4* from = reinterpret_cast<const uint4*>(partials);
    for (int i = threadIdx.x; i < kLanes * kWarpVectors; i += Shape::kThreads) {
      const int tile_lane = i / kWarpVectors, at = i % kWarpVectors, n = at / (kTileFloats / 4);
      const int tile = first_tile + round * kLanes + tile_lane;
      if (tile >= last_tile || n * kTokensPerTile >= tokens) continue;
      float sum[4] = {};
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        add_bits(sum, from[(tile_lane * kSlices + slice) * kWarpVectors + at]);
      }
      *reinterpret_cast<float4*>(sums + sums_at(group, tile, n) + at % (kTileFloats / 4) * 4) =
          make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
  }
};
