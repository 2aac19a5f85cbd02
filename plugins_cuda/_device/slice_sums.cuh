// The split-K reduction within a CTA: adds the partial sums of its warps for a chunk of tiles.
#pragma once

#include "small_linear.cuh"

// An element of a chunk: its tile in the chunk, the pair in the tile, the token.
struct Element {
  int tile, g, token;
};

// Elements in the order (tile, token, pair). A power of two as token count avoids divisions.
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

// Store this lane's sums of a chunk among the partial sums of its warp, from ``place`` on.
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

// Add the partial sums of all slices, in warp order, for elements from threadIdx.x on. Pass each
// pair of outputs to emit(index, element, row g, row g + 8).
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

// Add the partial sums of a CTA's warps for a chunk. They are kStrideBytes apart. kGuarded: they
// overwrite those of another chunk.
template <class Shape, int kStrideBytes, bool kGuarded, class Emit>
__device__ __forceinline__ void add_slices(
    float* partials, const float (&sums)[Shape::kTiles][Shape::kTokenTiles][4],
    const Elements& elements, Emit emit) {
  if constexpr (kGuarded) __syncthreads();
  store_partials<Shape>(partials + threadIdx.x / 32 * (kStrideBytes / 4), sums);
  __syncthreads();
  add_partials<Shape, kStrideBytes>(partials, elements, elements.count(Shape::kTiles), emit);
}

// The same for kHeld chunks at once, with one barrier. ``sums`` belong to ``chunk``; at the last
// chunk of this CTA the partial sums of all chunks are added. A warp has partial sums of kHeld
// chunks, and emit() receives tiles counted from the first chunk.
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
