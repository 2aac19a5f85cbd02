// Adds up what the warps of a CTA, which split K, have of a chunk of a weight's tiles.
#pragma once

#include "small_linear.cuh"

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

// Stores what this lane has of a chunk among the partial sums of its warp, from ``place`` on.
template <class Shape>
__device__ __forceinline__ void store_partials(
    float* place, const float (&sums)[Shape::kTiles][Shape::kTokenTiles][4]) {
  constexpr int kTokenPairs = Shape::kPartialTokens / 2;
  const int lane = threadIdx.x % 32;
  if (lane % 4 >= kTokenPairs) return;
  const int own_pair = kTokenPairs == 4 ? lane : lane / 4 * kTokenPairs + lane % 4;
#pragma unroll
  for (int t = 0; t < Shape::kTiles; ++t) {
#pragma unroll
    for (int n = 0; n < Shape::kTokenTiles; ++n) {
      float* tile = place + (t * Shape::kTokenTiles + n) * (Shape::kTilePartialBytes / 4);
      const float* own = sums[t][n];
      reinterpret_cast<float2*>(tile)[own_pair] = make_float2(own[0], own[1]);
      reinterpret_cast<float2*>(tile)[8 * kTokenPairs + own_pair] = make_float2(own[2], own[3]);
    }
  }
}

// Adds up what all slices have of elements from threadIdx.x on, in warp order, and gives each pair
// of outputs to emit(index, element, row g, row g + 8).
template <class Shape, int kStrideBytes, class Emit>
__device__ __forceinline__ void add_partials(const float* partials, const Elements& elements,
                                             int count, Emit emit) {
  constexpr int kTileFloats = Shape::kTilePartialBytes / 4, kStride = kStrideBytes / 4;
  for (int index = threadIdx.x; index < count; index += Shape::kThreads) {
    const Element e = elements.at(index);
    if (!elements.holds(e)) continue;
    const float* from = partials +
                        (e.tile * Shape::kTokenTiles + e.token / kTokensPerTile) * kTileFloats +
                        e.g * Shape::kPartialTokens + e.token % kTokensPerTile;
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

// Adds up what the warps of a CTA have of a chunk. A warp's partial sums stand kStrideBytes behind
// those of the one before. kGuarded: they replace those of another chunk.
template <class Shape, int kStrideBytes, bool kGuarded, class Emit>
__device__ __forceinline__ void add_slices(
    float* partials, const float (&sums)[Shape::kTiles][Shape::kTokenTiles][4],
    const Elements& elements, Emit emit) {
  if constexpr (kGuarded) __syncthreads();
  store_partials<Shape>(partials + threadIdx.x / 32 * (kStrideBytes / 4), sums);
  __syncthreads();
  add_partials<Shape, kStrideBytes>(partials, elements, elements.count(Shape::kTiles), emit);
}

// The same of all kHeld chunks at once, so that warps wait for each other once: ``sums`` are those
// of ``chunk``, and at the last one of this CTA all are added up. A warp's partial sums are those
// of kHeld chunks, and emit() gets tiles from the first one's on.
template <class Shape, int kHeld, class Emit>
__device__ __forceinline__ void add_held_slices(
    float* partials, const float (&sums)[Shape::kTiles][Shape::kTokenTiles][4],
    const Elements& elements, int chunk, bool last, Emit emit) {
  constexpr int kStrideBytes = kHeld * Shape::kWarpPartialBytes;
  store_partials<Shape>(
      partials + threadIdx.x / 32 * (kStrideBytes / 4) + chunk * (Shape::kWarpPartialBytes / 4),
      sums);
  if (!last) return;
  __syncthreads();
  add_partials<Shape, kStrideBytes>(partials, elements, elements.count(Shape::kTiles * (chunk + 1)),
                                    emit);
}
