// The types of a dense kernel for few tokens whose warps split K (dense_tokens.cuh).
#pragma once

#include "dense_tokens.cuh"
#include "stored_weights.cuh"
#include "weight_ring.cuh"

// Quantized weights pass through shared memory if the launch has ring stages for them.
template <class Shape, class Chunks, bool kPlaces = (Shape::Units::kScaled && Shape::kRing > 0)>
struct StreamOf {
  using Stream = WeightStream<Shape, Chunks>;
};
template <class Shape, class Chunks>
struct StreamOf<Shape, Chunks, true> {
  using Stream = WeightRing<Shape, Chunks>;
};

// C:
// - kKBlocks and kTileCount of the weight; kWeights, its storage;
// - kWarps; kSlices of K; kGroupSlices, the slices that are added before groups are;
// - kTiles and kTokenTiles of a chunk;
// - kDepth, the steps in flight; kRing of these are in shared memory: all or none of a quantized
//   weight;
// - kPartialTokens of a token tile's partial sums;
// - kCtas; kUnitPairs, the pairs that stay in one CTA; kOneChunk;
// - kOverlay, kTokenRows, kHeld and kSharedBytes: see DensePlaces.
template <class C, bool kFragments, bool kNormed>
struct DenseFew {
  using Units = typename WeightUnits<C::kWeights>::Units;
  using Shape = LinearShape<C::kKBlocks, C::kWarps, C::kSlices, C::kGroupSlices, C::kTiles,
                            C::kTokenTiles, C::kDepth, C::kRing, Units, C::kPartialTokens>;
  using Chunks = CtaChunks<C::kTiles, C::kOneChunk != 0>;
  using Stream = typename StreamOf<Shape, Chunks>::Stream;
  using Places = DensePlaces<Shape, kFragments, kNormed, C::kOverlay != 0, C::kTokenRows, C::kHeld>;
  static_assert(C::kSharedBytes == Places::kBytes, "as the launch says");

  // CTAs of a multiprocessor. With normed tokens as rows, the next launch can load its first
  // weights while this one runs, if both fit. Registers suffice if a CTA has few tiles at once.
  static constexpr bool kFewRegisters = Units::kScaled && Shape::kRing > 0 && !C::kOneChunk;
  static constexpr int kResident = kFewRegisters && kNormed && C::kTokenRows < kTokensPerTile &&
                                           Shape::kTiles <= 2 &&
                                           2 * (Places::kBytes + 1024) <= 228 * 1024
                                       ? 2
                                       : 1;

  // Whether every thread has at most one pair of outputs.
  static constexpr bool kAllEarly = C::kOneChunk && Shape::kOneElement;

  // The chunks of this CTA.
  static __device__ __forceinline__ Chunks chunks() {
    return {share_of_pairs<C::kTileCount * 8, C::kUnitPairs, C::kCtas>(blockIdx.x)};
  }
};
