// The types of a dense kernel whose warps split K, for few tokens (dense_tokens.cuh).
#pragma once

#include "dense_tokens.cuh"
#include "stored_weights.cuh"
#include "weight_ring.cuh"

// Coded weights come through shared memory where they have places there.
template <class Shape, class Chunks, bool kPlaces = (Shape::Units::kScaled && Shape::kRing > 0)>
struct StreamOf {
  using Stream = WeightStream<Shape, Chunks>;
};
template <class Shape, class Chunks>
struct StreamOf<Shape, Chunks, true> {
  using Stream = WeightRing<Shape, Chunks>;
};

// C: kKBlocks and kTileCount of the weight and kWeights, how it is stored; kWarps, kSlices (of K)
// and kGroupSlices (added up before groups are); kTiles and kTokenTiles of a chunk, kDepth (steps
// in flight) and kRing (of these in shared memory: all or none where weights are coded);
// kPartialTokens (of a token tile's partial sums); kCtas, kUnitPairs (that stay together) and
// kOneChunk; kOverlay, kTokenRows, kHeld and kSharedBytes as DensePlaces says.
template <class C, bool kFragments, bool kNormed>
struct DenseFew {
  using Units = typename WeightUnits<C::kWeights>::Units;
  using Shape = LinearShape<C::kKBlocks, C::kWarps, C::kSlices, C::kGroupSlices, C::kTiles,
                            C::kTokenTiles, C::kDepth, C::kRing, Units, C::kPartialTokens>;
  using Chunks = CtaChunks<C::kTiles, C::kOneChunk != 0>;
  using Stream = typename StreamOf<Shape, Chunks>::Stream;
  using Places = DensePlaces<Shape, kFragments, kNormed, C::kOverlay != 0, C::kTokenRows, C::kHeld>;
  static_assert(C::kSharedBytes == Places::kBytes, "as the launch says");

  // Whether no thread has another pair of outputs than its first.
  static constexpr bool kAllEarly = C::kOneChunk && Shape::kOneElement;

  // Those of this CTA.
  static __device__ __forceinline__ Chunks chunks() {
    return {share_of_pairs<C::kTileCount * 8, C::kUnitPairs, C::kCtas>(blockIdx.x)};
  }
};
