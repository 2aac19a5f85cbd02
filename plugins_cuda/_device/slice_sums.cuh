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
