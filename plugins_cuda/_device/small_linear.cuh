// Small-batch linear: packed weights stream once through registers, tokens are few.
//
// A weight tile is 16 rows × 32 columns, 1024 bytes (linear/packing.py); its rows g and g + 8 make
// a pair. A CTA owns a contiguous run of pairs, so that 132 CTAs are balanced to one unit of pairs:
//   QKV 5120 rows = 2560 pairs: 5 units of 4 at most, 4.85 on average: 97 % (whole tiles: 81 %)
//   O, down 2880 rows = 1440 pairs: 3 units of 4, 2.73 on average: 91 % (whole tiles: 68 %)
// Its warps split K (kSlices = kWarps, partial sums added in warp order in shared memory), or each
// has tiles of its own (kSlices = 1). Every warp holds kDepth steps of weights in flight. Those
// that wait in registers are started before the launch in front is done; the last kRing of them,
// which wait in shared memory, once the tokens are asked for, so that no weights stand in front of
// these. Where all of a CTA's steps are in flight at once, nothing that the tokens go through
// delays them: QKV's 223 KB are 138 KB in registers and 138 KB in shared memory, a fifth of both
// unused.
//
// For one output element the order of additions is: along its slice of K, over the slices of a
// group, over groups. It depends on K alone, not on the tokens, the grid or the chunking of rows.
#pragma once

#include "bf16.cuh"
#include "ptx.cuh"
#include "ptx_early.cuh"
#include "token_fragments.cuh"

constexpr int kTileBytes = 1024, kHalfTileBytes = 512, kPairsPerTile = 8;

__host__ __device__ constexpr int larger(int a, int b) {
  return a < b ? b : a;
}

// Compile-time sizes. kTiles: weight tiles that a warp works on at once; kTokenTiles: groups of 8
// tokens; kDepth: steps in flight, kRing of them in shared memory; kGroupSlices: slices that are
// added up before groups of them are.
template <int kBlocks_, int kWarps_, int kSlices_, int kGroupSlices_, int kTiles_, int kTokenTiles_,
          int kDepth_, int kRing_>
struct LinearShape {
  static constexpr int kBlocks = kBlocks_, kWarps = kWarps_, kSlices = kSlices_, kTiles = kTiles_;
  static constexpr int kGroupSlices = kGroupSlices_;
  static constexpr int kTokenTiles = kTokenTiles_, kDepth = kDepth_;
  static constexpr int kRing = kRing_, kInRegisters = kDepth - kRing;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kMostTokens = kTokenTiles * kTokensPerTile;
  static constexpr int kSliceBlocks = ceil_div(kBlocks, kSlices);
  static constexpr int kSteps = round_up(kSliceBlocks, kDepth);
  static constexpr bool kEven = kSliceBlocks * kSlices == kBlocks && kSteps == kSliceBlocks;
  static constexpr int kWarpPartialBytes = kTiles * kTokenTiles * kHalfTileBytes;
  static constexpr int kPartialBytes = kWarps * kWarpPartialBytes;
  static constexpr int kRingBytes = kWarps * kRing * kTiles * kTileBytes;
  // Whether a thread adds up at most one element of a chunk.
  static constexpr bool kOneElement = kTiles * kPairsPerTile * kMostTokens <= kThreads;
  static_assert(kSlices % kGroupSlices == 0, "whole groups");
  static_assert(kDepth <= kSteps, "more steps in flight than there are");
  static_assert(kInRegisters > 0, "what is started early waits in registers");
};

// The slice of K of this warp, where warps split K or each has all of it.
template <class Shape>
__device__ __forceinline__ int slice_of_warp() {
  static_assert(Shape::kSlices == Shape::kWarps || Shape::kSlices == 1, "one or all");
  return Shape::kSlices == 1 ? 0 : threadIdx.x / 32;
}

// The pairs [first, last) of a CTA, and the tiles that they touch.
struct PairRange {
  int first, last;
  __device__ __forceinline__ int first_tile() const {
    return first / kPairsPerTile;
  }
  __device__ __forceinline__ int tiles() const {
    return ceil_div(last, kPairsPerTile) - first_tile();
  }
};

// An even share of kPairs pairs among kCtas, in units of kUnitPairs, which divides 8.
template <int kPairs, int kUnitPairs, int kCtas>
__device__ __forceinline__ PairRange share_of_pairs(unsigned cta) {
  constexpr unsigned kUnits = kPairs / kUnitPairs;
  static_assert(kPairs % kUnitPairs == 0 && kPairsPerTile % kUnitPairs == 0, "whole units");
  return {static_cast<int>(kUnits * cta / kCtas) * kUnitPairs,
          static_cast<int>(kUnits * (cta + 1) / kCtas) * kUnitPairs};
}

// Chunks of kTiles tiles that a CTA walks through together; kOneChunk: one holds all of any CTA's.
template <int kTiles, bool kOneChunk>
struct CtaChunks {
  static constexpr bool kOnlyOne = kOneChunk;
  PairRange range;
  __device__ __forceinline__ int count() const {
    return kOneChunk ? 1 : ceil_div(range.tiles(), kTiles);
  }
  __device__ __forceinline__ int first_tile(int chunk) const {
    return range.first_tile() + chunk * kTiles;
  }
  __device__ __forceinline__ bool holds(int pair) const {
    return pair >= range.first && pair < range.last;
  }
};

// Tokens whose fragments stand in shared memory; ``place``: this lane's of its slice's first block.
template <class Shape>
struct SharedTokens {
  const uint4* place;

  __device__ __forceinline__ void begin() {}
  __device__ __forceinline__ void end() {}
  __device__ __forceinline__ void fetch(int, int) {}
  __device__ __forceinline__ uint4 get(int, int block, int token_tile) const {
    return place[(block * Shape::kTokenTiles + token_tile) * (kFragmentBytes / 16)];
  }
};

// Tokens too wide for that come straight from L2, as they need no norm: each warp reads its slice.
template <class Shape>
struct GlobalTokens {
  const uint16_t* place;
  int width, live;  // tokens from this lane's on
  uint4 held[Shape::kDepth][Shape::kTokenTiles];

  __device__ __forceinline__ GlobalTokens(const uint16_t* x, int width_, int tokens) {
    const int slice = slice_of_warp<Shape>(), lane = threadIdx.x % 32;
    place = x + static_cast<int64_t>(lane / 4) * width_ + slice * Shape::kSliceBlocks * 32 +
            lane % 4 * 8;
    width = width_;
    live = tokens - lane / 4;
  }
  __device__ __forceinline__ void begin() {}
  __device__ __forceinline__ void end() {}
  __device__ __forceinline__ void fetch(int slot, int block) {
#pragma unroll
    for (int n = 0; n < Shape::kTokenTiles; ++n) {
      held[slot][n] = make_uint4(0, 0, 0, 0);
      if (n * kTokensPerTile < live) {
        held[slot][n] = load_l2_16(place + n * kTokensPerTile * width + block * 32);
      }
    }
  }
  __device__ __forceinline__ uint4 get(int slot, int, int token_tile) const {
    return held[slot][token_tile];
  }
};

// A warp's weights, kDepth steps ahead; a step is one block of 32 columns of kTiles tiles.
template <class Shape, class Chunks>
class WeightStream {
 public:
  using Sums = float[Shape::kTiles][Shape::kTokenTiles][4];

  __device__ __forceinline__ WeightStream(const uint16_t* weight, const Chunks& chunks,
                                          unsigned char* ring, int slice)
      : chunks_(chunks) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    weight_ = reinterpret_cast<const unsigned char*>(weight) +
              slice * Shape::kSliceBlocks * kTileBytes + lane * 16;
    blocks_ = min(Shape::kSliceBlocks, Shape::kBlocks - slice * Shape::kSliceBlocks);
    ring_ = ring + warp * Shape::kRing * Shape::kTiles * kTileBytes + lane * 16;
  }

  // Starts the first loads: the weights are constant, so no other launch is waited for.
  __device__ __forceinline__ void start() {
    const Place first = place(0);
#pragma unroll
    for (int i = 0; i < Shape::kInRegisters; ++i) load(i, first, i);
  }

  // Starts those that wait in shared memory, one group of copies each.
  __device__ __forceinline__ void start_ring() {
    const Place first = place(0);
#pragma unroll
    for (int i = Shape::kInRegisters; i < Shape::kDepth; ++i) load(i, first, i);
  }

  // Starts the first loads of the tokens, which other launches write.
  template <class Tokens>
  __device__ __forceinline__ void fetch(Tokens& tokens) const {
    if (chunks_.count() == 0) return;
#pragma unroll
    for (int i = 0; i < Shape::kDepth; ++i) {
      if (Shape::kEven || i < blocks_) tokens.fetch(i, i);
    }
  }

  // Every chunk's sums over this warp's slice go to finish(chunk, sums).
  template <class Tokens, class Finish>
  __device__ __forceinline__ void run(Tokens& tokens, Finish finish) {
    const int count = chunks_.count();
    Place here = place(0);
#pragma unroll 1
    for (int chunk = 0; chunk < count; ++chunk) {
      const Place next = place(chunk + 1);
      Sums sums = {};
#pragma unroll 1
      for (int base = 0; base < Shape::kSteps; base += Shape::kDepth) {
        const bool last = base + Shape::kDepth >= Shape::kSteps;
        const Place from = {last ? next.address : here.address, last ? next.tiles : here.tiles};
        const int ahead = last ? 0 : base + Shape::kDepth;
        tokens.begin();
#pragma unroll
        for (int i = 0; i < Shape::kDepth; ++i) {
          if (Shape::kEven || base + i < blocks_) multiply(sums, tokens, i, base + i);
          if (kAllAtOnce) continue;
          load(i, from, ahead + i);
          if ((!last || chunk + 1 < count) && (Shape::kEven || ahead + i < blocks_)) {
            tokens.fetch(i, ahead + i);
          }
        }
        tokens.end();
      }
      finish(chunk, sums);
      here = next;
    }
  }

 private:
  // Whether no load follows the first ones.
  static constexpr bool kAllAtOnce = Chunks::kOnlyOne && Shape::kDepth == Shape::kSteps;

  // Where a chunk's first tile begins for this lane, and which of its tiles the lane needs.
  struct Place {
    const unsigned char* address;
    unsigned tiles;
  };

  __device__ __forceinline__ Place place(int chunk) const {
    if (chunk >= chunks_.count()) return {weight_, 0};
    const int tile = chunks_.first_tile(chunk), g = threadIdx.x % 32 / 4;
    unsigned tiles = 0;
#pragma unroll
    for (int t = 0; t < Shape::kTiles; ++t) {
      if (chunks_.holds((tile + t) * kPairsPerTile + g)) tiles |= 1u << t;
    }
    return {weight_ + static_cast<int64_t>(tile) * Shape::kBlocks * kTileBytes, tiles};
  }

  __device__ __forceinline__ void load(int slot, const Place& from, int block) {
#pragma unroll
    for (int t = 0; t < Shape::kTiles; ++t) {
      const unsigned char* address = from.address + (t * Shape::kBlocks + block) * kTileBytes;
      const bool needed = (from.tiles >> t & 1) && (Shape::kEven || block < blocks_);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!needed) continue;
        const unsigned char* from_half = address + half * kHalfTileBytes;
        if (slot < Shape::kInRegisters) {
          held_[slot][t][half] = load_early16(from_half);
        } else {
          cp_async_16(ring_place(slot, t, half), from_half);
        }
      }
    }
    if (slot >= Shape::kInRegisters) cp_async_commit();
  }

  template <class Tokens>
  __device__ __forceinline__ void multiply(Sums& sums, const Tokens& tokens, int slot, int block) {
    if (slot >= Shape::kInRegisters) wait_for_ring(slot - Shape::kInRegisters);
    uint32_t first[Shape::kTiles][4], second[Shape::kTiles][4];
#pragma unroll
    for (int t = 0; t < Shape::kTiles; ++t) {
      const uint4 upper = held(slot, t, 0), lower = held(slot, t, 1);
      set(first[t], upper.x, lower.x, upper.y, lower.y);
      set(second[t], upper.z, lower.z, upper.w, lower.w);
    }
#pragma unroll
    for (int n = 0; n < Shape::kTokenTiles; ++n) {
      const uint4 b = tokens.get(slot, block, n);
      const uint32_t b_first[2] = {b.x, b.y}, b_second[2] = {b.z, b.w};
#pragma unroll
      for (int t = 0; t < Shape::kTiles; ++t) mma_bf16(sums[t][n], first[t], b_first);
#pragma unroll
      for (int t = 0; t < Shape::kTiles; ++t) mma_bf16(sums[t][n], second[t], b_second);
    }
  }

  static __device__ __forceinline__ void set(uint32_t (&to)[4], uint32_t a, uint32_t b, uint32_t c,
                                             uint32_t d) {
    to[0] = a;
    to[1] = b;
    to[2] = c;
    to[3] = d;
  }

  __device__ __forceinline__ uint4 held(int slot, int t, int half) const {
    if (slot < Shape::kInRegisters) return held_[slot][t][half];
    return *reinterpret_cast<const uint4*>(ring_place(slot, t, half));
  }

  // Steps of the ring arrive in order; the younger ones may be under way.
  __device__ __forceinline__ void wait_for_ring(int entry) const {
    constexpr int kYounger = larger(Shape::kRing - 1, 0);
    if (!kAllAtOnce) {
      cp_async_wait<kYounger>();
      return;
    }
    switch (kYounger - entry) {
      case 0:
        return cp_async_wait<0>();
      case 1:
        return cp_async_wait<1>();
      case 2:
        return cp_async_wait<2>();
      case 3:
        return cp_async_wait<3>();
      default:
        return cp_async_wait<4>();
    }
  }

  __device__ __forceinline__ unsigned char* ring_place(int slot, int t, int half) const {
    return ring_ + (((slot - Shape::kInRegisters) * Shape::kTiles + t) * 2 + half) * kHalfTileBytes;
  }

  Chunks chunks_;
  const unsigned char* weight_;
  unsigned char* ring_;
  int blocks_;
  uint4 held_[Shape::kInRegisters][Shape::kTiles][2];
};

// Where an element of a chunk stands: its tile in the chunk, the pair in the tile, the token.
struct Element {
  int tile, g, token;
};

// Elements in the order (tile, token, pair), tokens counted as a power of two: no division.
struct Elements {
  int tokens, shift;
  __device__ __forceinline__ explicit Elements(int tokens_)
      : tokens(tokens_), shift(32 - __clz(tokens_ - 1)) {}
  __device__ __forceinline__ Element at(int index) const {
    const int pair = index / kPairsPerTile;
    return {pair >> shift, index % kPairsPerTile, pair & ((1 << shift) - 1)};
  }
  __device__ __forceinline__ bool holds(const Element& e) const {
    return e.token < tokens;
  }
  __device__ __forceinline__ int count(int tiles) const {
    return (tiles * kPairsPerTile) << shift;
  }
};

// Adds up what the warps of a CTA have of a chunk, in warp order, and gives each pair of outputs to
// emit(index, element, row g, row g + 8). A warp's partial sums stand kStrideBytes behind those of
// the one before. kGuarded: they replace those of another chunk.
template <class Shape, int kStrideBytes, bool kGuarded, class Emit>
__device__ __forceinline__ void add_slices(
    float* partials, const float (&sums)[Shape::kTiles][Shape::kTokenTiles][4],
    const Elements& elements, Emit emit) {
  constexpr int kTileFloats = kHalfTileBytes / 4, kStride = kStrideBytes / 4;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if constexpr (kGuarded) __syncthreads();
#pragma unroll
  for (int t = 0; t < Shape::kTiles; ++t) {
#pragma unroll
    for (int n = 0; n < Shape::kTokenTiles; ++n) {
      float* tile = partials + warp * kStride + (t * Shape::kTokenTiles + n) * kTileFloats;
      const float* own = sums[t][n];
      reinterpret_cast<float2*>(tile)[lane] = make_float2(own[0], own[1]);
      reinterpret_cast<float2*>(tile)[32 + lane] = make_float2(own[2], own[3]);
    }
  }
  __syncthreads();
  for (int index = threadIdx.x; index < elements.count(Shape::kTiles); index += Shape::kThreads) {
    const Element e = elements.at(index);
    if (!elements.holds(e)) continue;
    const float* from = partials +
                        (e.tile * Shape::kTokenTiles + e.token / kTokensPerTile) * kTileFloats +
                        e.g * kTokensPerTile + e.token % kTokensPerTile;
    float low = 0.0f, high = 0.0f;
#pragma unroll
    for (int first = 0; first < Shape::kSlices; first += Shape::kGroupSlices) {
      float group_low = 0.0f, group_high = 0.0f;
#pragma unroll
      for (int slice = first; slice < first + Shape::kGroupSlices; ++slice) {
        const float* partial = from + slice * kStride;
        group_low += partial[0];
        group_high += partial[kTileFloats / 2];
      }
      low += group_low;
      high += group_high;
    }
    emit(index, e, low, high);
  }
}
