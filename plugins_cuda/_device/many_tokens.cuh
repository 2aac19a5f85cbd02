// Dense layers with up to 64 tokens per CTA: weights are read once, and warps share the tokens.
//
// The limit is the bandwidth from L2 to an SM, for weights and tokens. A CTA therefore has a share
// of the weight's tiles × one group of K slices, so that it reads only that part of the tokens.
// Each of the 132 CTAs of QKV reads 223 KB of weights and 123 KB of tokens instead of 368 KB. A
// warp has one slice of the group and one of kLanes tiles. The order of additions is that of
// small_linear.cuh within a group, and that of group_sums.cuh between groups.
#pragma once

#include "group_sums.cuh"

// The tiles of one warp: every kLanes-th of the CTA's range. All warps of a CTA execute the same
// number of rounds.
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

// kShares CTAs share kTileCount tiles, in each of kGroups groups of slices.
template <class Shape_, int kTileCount, int kShares>
struct ManyTokens : GroupSums<kTileCount, Shape_::kSlices / Shape_::kGroupSlices, kShares,
                              Shape_::kTokenTiles, Shape_::kThreads> {
  using Shape = Shape_;
  using Sums = GroupSums<kTileCount, Shape::kSlices / Shape::kGroupSlices, kShares,
                         Shape::kTokenTiles, Shape::kThreads>;
  using Sums::add_bits, Sums::first_tile, Sums::first_token, Sums::group, Sums::last_tile,
      Sums::kGroups, Sums::kTileFloats, Sums::kTokenTiles, Sums::tokens;
  static constexpr int kSlices = Shape::kGroupSlices, kLanes = Shape::kWarps / kSlices;
  static constexpr int kBlocks = kSlices * Shape::kSliceBlocks;  // of a group; the last has fewer
  static constexpr int kThreads = Shape::kThreads;
  static constexpr int kTokenBytes = kBlocks * kTokenTiles * kFragmentBytes;
  static constexpr int kBytes = kTokenBytes + Shape::kPartialBytes;
  using Chunks = LaneChunks<kLanes>;
  using Stream = WeightStream<Shape, Chunks>;
  using Input = SharedTokens<Shape>;
  static_assert(Shape::kTiles == 1 && Shape::kWarps % kSlices == 0, "a warp has one tile");

  using Sums::Sums;

  __device__ __forceinline__ int slice() const {
    return threadIdx.x / 32 % kSlices;
  }
  __device__ __forceinline__ Chunks chunks() const {
    return {first_tile, last_tile, static_cast<int>(threadIdx.x) / 32 / kSlices};
  }
  __device__ __forceinline__ Stream stream(const typename Shape::Units::Stored* weight) const {
    return Stream(weight, chunks(), nullptr, group * kSlices + slice());
  }

  // Start to copy this group's part of the tokens: from the rows of ``x``, or from the result of
  // normed_tokens(), [groups of tokens][blocks of all groups][kTokenTiles][lane] 16 bytes.
  __device__ __forceinline__ Input fetch_rows(unsigned char* shared, const uint16_t* x) const {
    const int lane = threadIdx.x % 32;
    each_fragment([&](int block, int n) {
      const int token = n * kTokensPerTile + lane / 4, column = (group * kBlocks + block) * 32;
      if (token >= tokens || column >= Shape::kBlocks * 32) return;
      cp_async_16(shared + (block * kTokenTiles + n) * kFragmentBytes + lane * 16,
                  x + static_cast<int64_t>(first_token + token) * (Shape::kBlocks * 32) + column +
                      lane % 4 * 8);
    });
    return input(shared);
  }
  __device__ __forceinline__ Input fetch_ready(unsigned char* shared,
                                               const unsigned char* ready) const {
    const unsigned char* from =
        ready + (static_cast<int64_t>(blockIdx.y) * kGroups + group) * kTokenBytes;
    each_fragment([&](int block, int n) {
      const int at = (block * kTokenTiles + n) * kFragmentBytes + threadIdx.x % 32 * 16;
      if (n * kTokensPerTile < tokens) cp_async_16(shared + at, from + at);
    });
    return input(shared);
  }

  // Call it after the copies started; the group's sums of all tiles go to ``sums``.
  __device__ __forceinline__ void multiply(Stream& stream, Input& input, unsigned char* shared,
                                           float* sums) const {
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    float* partials = reinterpret_cast<float*>(shared + kTokenBytes);
    stream.run(input, [&](int round, const typename Stream::Sums& own) {
      add_group(partials, own, round, sums);
    });
  }

 private:
  __device__ __forceinline__ Input input(unsigned char* shared) const {
    return {reinterpret_cast<const uint4*>(shared) +
            slice() * Shape::kSliceBlocks * kTokenTiles * (kFragmentBytes / 16) + threadIdx.x % 32};
  }

  template <class Visit>
  static __device__ __forceinline__ void each_fragment(const Visit& visit) {
#pragma unroll 4
    for (int i = threadIdx.x / 32; i < kBlocks * kTokenTiles; i += Shape::kWarps) {
      visit(i / kTokenTiles, i % kTokenTiles);
    }
  }

  // Add the slices of a round's tiles in order.
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
      *reinterpret_cast<float4*>(sums + this->sums_at(group, tile, n) +
                                 at % (kTileFloats / 4) * 4) =
          make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
  }
};
