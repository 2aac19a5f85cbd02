// Linear layers of few tokens: packed weights are streamed once through registers.
//
// A weight tile is 16 rows × K, in units of one or two blocks of 32 columns (weight_units.cuh). Its
// rows g and g + 8 form a pair. A CTA has a contiguous range of pairs, so that the load of CTAs
// differs by one unit of pairs at most: QKV 5120 rows = 2560 pairs, 128 CTAs: 5 units of 4 each
// (with full tiles on 132 CTAs: 81 % busy) O, down 2880 rows = 1440 pairs, 124 CTAs: 3 units of 4,
// 2.9 on average (full tiles: 68 %)
//
// The warps of a CTA split K (kSlices = kWarps; partial sums are added in warp order in shared
// memory), or each has separate tiles (kSlices = 1). Every warp has kDepth steps of weights in
// flight. Loads to registers start before the previous launch has finished. The last kRing steps,
// which are copied to shared memory, start after the loads of the tokens, so that they do not delay
// these. If all steps of a CTA are in flight at once, the tokens are not delayed at all. The 223 KB
// of QKV, for example, use 138 KB of registers and 138 KB of shared memory, of both one fifth in
// vain.
//
// The additions of an output element are ordered: along its slice of K, over the slices of a group,
// over groups. This order depends on K only, not on the tokens, the grid or the chunks.
#pragma once

#include "bf16.cuh"
#include "ptx.cuh"
#include "ptx_load.cuh"
#include "token_fragments.cuh"
#include "weight_units.cuh"

constexpr int kHalfTileBytes = 512, kPairsPerTile = 8;

__host__ __device__ constexpr int larger(int a, int b) {
  return a < b ? b : a;
}

// Compile-time sizes. kTiles: weight tiles that a warp processes at once. kTokenTiles: groups of 8
// tokens. kDepth: steps in flight, kRing of them in shared memory. kGroupSlices: slices that are
// added before groups are. A step is a unit of the weight.
template <int kBlocks_, int kWarps_, int kSlices_, int kGroupSlices_, int kTiles_, int kTokenTiles_,
          int kDepth_, int kRing_, class Units_, int kPartialTokens_ = kTokensPerTile>
struct LinearShape {
  using Units = Units_;
  static constexpr int kBlocks = kBlocks_, kWarps = kWarps_, kSlices = kSlices_, kTiles = kTiles_;
  static constexpr int kGroupSlices = kGroupSlices_;
  static constexpr int kTokenTiles = kTokenTiles_, kDepth = kDepth_;
  static constexpr int kRing = kRing_, kInRegisters = kDepth - kRing;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kMaxTokens = kTokenTiles * kTokensPerTile;
  static constexpr int kUnitBlocks = Units::kBlocks, kUnits = ceil_div(kBlocks, kUnitBlocks);
  static constexpr int kSliceBlocks = ceil_div(kBlocks, kSlices);
  static constexpr int kSliceUnits = ceil_div(kSliceBlocks, kUnitBlocks);
  // Whether slices consist of complete units. Otherwise two adjacent slices may share a unit, a
  // block each.
  static constexpr bool kWholeUnits = kSliceBlocks % kUnitBlocks == 0;
  static constexpr int kDepthBlocks = kDepth * kUnitBlocks;
  static constexpr int kSteps = round_up(kSliceUnits, kDepth);
  static constexpr bool kEven =
      kSliceBlocks * kSlices == kBlocks && kSteps == kSliceUnits && kWholeUnits;
  static constexpr int kPartialTokens = kPartialTokens_;
  static constexpr int kTilePartialBytes = kPartialTokens * 64;
  static constexpr int kWarpPartialBytes = kTiles * kTokenTiles * kTilePartialBytes;
  static constexpr int kPartialBytes = kWarps * kWarpPartialBytes;
  static constexpr int kRingBytes = kWarps * kRing * kTiles * Units::kBytes;
  // Whether a thread adds at most one element of a chunk.
  static constexpr bool kOneElement = kTiles * kPairsPerTile * kMaxTokens <= kThreads;
  static_assert(kSlices % kGroupSlices == 0, "groups are complete");
  static_assert(kDepth <= kSteps, "no more steps in flight than a slice has");
  static_assert(kInRegisters > 0 || Units::kScaled, "loads that start early are in registers");
  static_assert(kRing == 0 || kInRegisters == 0 || !Units::kScaled, "scales are in one place");
};

// The slice of K of this warp: its own if warps split K, otherwise all of K.
template <class Shape>
__device__ __forceinline__ int slice_of_warp() {
  static_assert(Shape::kSlices == Shape::kWarps || Shape::kSlices == 1,
                "one slice, or one per warp");
  return Shape::kSlices == 1 ? 0 : threadIdx.x / 32;
}

// The pairs [first, last) of a CTA, and their tiles.
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
  static_assert(kPairs % kUnitPairs == 0 && kPairsPerTile % kUnitPairs == 0, "units are complete");
  return {static_cast<int>(kUnits * cta / kCtas) * kUnitPairs,
          static_cast<int>(kUnits * (cta + 1) / kCtas) * kUnitPairs};
}

// The chunks of kTiles tiles of a CTA; kOneChunk: every CTA has one chunk at most.
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

// Tokens whose fragments are in shared memory; ``place`` is this lane's part of the first block of
// its slice.
template <class Shape, int kBlockBytes = Shape::kTokenTiles * kFragmentBytes>
struct SharedTokens {
  const uint4* place;

  __device__ __forceinline__ void fetch(int, int) {}
  __device__ __forceinline__ uint4 get(int, int block, int token_tile) const {
    return place[block * (kBlockBytes / 16) + token_tile * (kFragmentBytes / 16)];
  }
};

// Tokens that are too wide for shared memory and need no norm: each warp reads its slice directly
// from L2.
template <class Shape>
struct GlobalTokens {
  const uint16_t* place;
  int width, live;  // live: tokens from this lane's on
  uint4 held[Shape::kDepthBlocks][Shape::kTokenTiles];

  __device__ __forceinline__ GlobalTokens(const uint16_t* x, int width_, int tokens) {
    const int slice = slice_of_warp<Shape>(), lane = threadIdx.x % 32;
    place = x + static_cast<int64_t>(lane / 4) * width_ + slice * Shape::kSliceBlocks * 32 +
            lane % 4 * 8;
    width = width_;
    live = tokens - lane / 4;
  }
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

// The weights of a warp, kDepth steps ahead; a step is one unit of kTiles tiles. Tokens are
// accessed by blocks of 32 columns: ``get`` and ``fetch`` take the index of a block among
// kDepthBlocks, and its index in the slice. A slice may start with the second block of a unit.
template <class Shape, class Chunks>
class WeightStream {
 public:
  using Sums = float[Shape::kTiles][Shape::kTokenTiles][4];
  static constexpr int kLate = Shape::kRing;  // groups of copies that start after the tokens

  __device__ __forceinline__ WeightStream(const typename Shape::Units::Stored* weight,
                                          const Chunks& chunks, unsigned char* ring, int slice)
      : chunks_(chunks) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first = slice * Shape::kSliceBlocks;
    weight_ = reinterpret_cast<const unsigned char*>(weight) +
              first / Shape::kUnitBlocks * Units::kBytes + lane * 16;
    blocks_ = min(Shape::kSliceBlocks, Shape::kBlocks - first);
    skipped_ = Shape::kWholeUnits ? 0 : first % Shape::kUnitBlocks;
    ring_ = ring + warp * Shape::kRing * Shape::kTiles * Units::kBytes + lane * 16;
  }

  // Start the first loads. Weights are constant, so they do not wait for previous launches.
  __device__ __forceinline__ void start() {
    const Place first = place(0);
#pragma unroll
    for (int i = 0; i < Shape::kInRegisters; ++i) load(i, first, i);
  }

  // Start the copies to shared memory, one group each.
  __device__ __forceinline__ void start_ring() {
    const Place first = place(0);
#pragma unroll
    for (int i = Shape::kInRegisters; i < Shape::kDepth; ++i) load(i, first, i);
  }

  // Start the first loads of the tokens, which previous launches write.
  template <class Tokens>
  __device__ __forceinline__ void fetch(Tokens& tokens) const {
    if (chunks_.count() == 0) return;
#pragma unroll
    for (int i = 0; i < Shape::kDepth; ++i) {
      if (holds(i)) fetch_unit(tokens, i, i);
    }
  }

  // Pass the sums of every chunk over this warp's slice to finish(chunk, sums).
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
#pragma unroll
        for (int i = 0; i < Shape::kDepth; ++i) {
          if (holds(base + i)) multiply(sums, tokens, i, base + i);
          if (kAllAtOnce) continue;
          load(i, from, ahead + i);
          if ((!last || chunk + 1 < count) && holds(ahead + i)) fetch_unit(tokens, i, ahead + i);
        }
      }
      finish(chunk, sums);
      here = next;
    }
  }

 private:
  using Units = typename Shape::Units;
  using Held = typename Units::Held;

  // Whether the first loads are all loads.
  static constexpr bool kAllAtOnce = Chunks::kOnlyOne && Shape::kDepth == Shape::kSteps;
  // Whether every step is a separate branch. In straight-line code ptxas decodes so far ahead that
  // it runs out of registers.
  static constexpr bool kSeparateSteps =
      Units::kSeparateSteps == SeparateSteps::kAlways ||
      (kAllAtOnce && Units::kSeparateSteps == SeparateSteps::kAllAtOnce);

  // This lane's address in the first tile of a chunk, and a mask of the tiles that it reads.
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
    return {weight_ + static_cast<int64_t>(tile) * Shape::kUnits * Units::kBytes, tiles};
  }

  // The index in the slice of a unit's first block; negative if it belongs to another slice.
  __device__ __forceinline__ int first_block(int unit) const {
    return unit * Shape::kUnitBlocks - skipped();
  }
  __device__ __forceinline__ int skipped() const {
    return Shape::kWholeUnits ? 0 : skipped_;
  }

  // Whether a unit belongs to this slice, and whether a block of it does.
  __device__ __forceinline__ bool holds(int unit) const {
    return (Shape::kEven && !kSeparateSteps) || max(first_block(unit), 0) < blocks_;
  }
  __device__ __forceinline__ bool holds_block(int block) const {
    constexpr bool kWhole = Shape::kBlocks % Shape::kUnitBlocks == 0 && Shape::kWholeUnits;
    return kWhole || (block >= 0 && block < blocks_);
  }

  __device__ __forceinline__ void load(int slot, const Place& from, int unit) {
#pragma unroll
    for (int t = 0; t < Shape::kTiles; ++t) {
      const unsigned char* address = from.address + (t * Shape::kUnits + unit) * Units::kBytes;
      const bool needed = (from.tiles >> t & 1) && holds(unit);
#pragma unroll
      for (int piece = 0; piece < Units::kLoads; ++piece) {
        if (!needed) continue;
        const unsigned char* from_piece = address + piece * kLoadBytes;
        if (slot < Shape::kInRegisters) {
          held_[slot][t].pieces[piece] = load_early16(from_piece);
        } else {
          cp_async_16(ring_place(slot, t, piece), from_piece);
        }
      }
      if (slot < Shape::kInRegisters && needed) {
        load_scales<Units>(held_[slot][t], address, [](const void* at) { return load_early4(at); });
      }
    }
    if (slot >= Shape::kInRegisters) cp_async_commit();
  }

  template <class Tokens>
  __device__ __forceinline__ void fetch_unit(Tokens& tokens, int slot, int unit) const {
#pragma unroll
    for (int i = 0; i < Shape::kUnitBlocks; ++i) {
      const int block = first_block(unit) + i;
      if (holds_block(block)) tokens.fetch(slot * Shape::kUnitBlocks + i, block);
    }
  }

  template <class Tokens>
  __device__ __forceinline__ void multiply(Sums& sums, const Tokens& tokens, int slot, int unit) {
    if (slot >= Shape::kInRegisters) wait_for_ring(slot - Shape::kInRegisters);
    if (Shape::kWholeUnits || first_block(unit) >= 0) multiply_block<0>(sums, tokens, slot, unit);
    if constexpr (Shape::kUnitBlocks == 2) {
      if (holds_block(first_block(unit) + 1)) multiply_block<1>(sums, tokens, slot, unit);
    }
  }

  template <int at, class Tokens>
  __device__ __forceinline__ void multiply_block(Sums& sums, const Tokens& tokens, int slot,
                                                 int unit) {
    uint32_t first[Shape::kTiles][4], second[Shape::kTiles][4];
#pragma unroll
    for (int t = 0; t < Shape::kTiles; ++t) {
      Units::template decode<at>(held(slot, t), first[t], second[t]);
    }
#pragma unroll
    for (int n = 0; n < Shape::kTokenTiles; ++n) {
      const uint4 b = tokens.get(slot * Shape::kUnitBlocks + at, first_block(unit) + at, n);
      const uint32_t b_first[2] = {b.x, b.y}, b_second[2] = {b.z, b.w};
#pragma unroll
      for (int t = 0; t < Shape::kTiles; ++t) mma_bf16(sums[t][n], first[t], b_first);
#pragma unroll
      for (int t = 0; t < Shape::kTiles; ++t) mma_bf16(sums[t][n], second[t], b_second);
      // Otherwise ptxas decodes and loads so far ahead that it runs out of registers.
      if (Units::kScaled && (n % 4 == 3 || n == Shape::kTokenTiles - 1)) __syncwarp();
    }
  }

  __device__ __forceinline__ Held held(int slot, int t) const {
    if (slot < Shape::kInRegisters) return held_[slot][t];
    Held held;
#pragma unroll
    for (int piece = 0; piece < Units::kLoads; ++piece) {
      held.pieces[piece] = *reinterpret_cast<const uint4*>(ring_place(slot, t, piece));
    }
    return held;
  }

  // Wait for a step of the ring. Steps arrive in order; later ones may be in flight.
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

  __device__ __forceinline__ unsigned char* ring_place(int slot, int t, int piece) const {
    const int unit = (slot - Shape::kInRegisters) * Shape::kTiles + t;
    return ring_ + (unit * Units::kLoads + piece) * kLoadBytes;
  }

  Chunks chunks_;
  const unsigned char* weight_;
  unsigned char* ring_;
  int blocks_, skipped_;
  Held held_[Shape::kInRegisters][Shape::kTiles];
};
