// The head for a few normalized rows. Every warp has separate tiles and all of K, so the loop has
// no barrier.
//
// The vocabulary is divided into segments of tiles, one warp per segment. A reduction over a
// segment is therefore independent of the grid. With 132 CTAs of 16 warps, the 12568 tiles of
// GPT-OSS are 2095 segments of 6, about one per warp.
#pragma once

#include "small_linear.cuh"
#include "stored_weights.cuh"

// The tiles of the segments first, first + warps, … of a CTA's range of segments, in order.
// kTogether: every warp of a CTA executes the same number of rounds; those past its tiles are idle.
template <int kSegments, int kSegmentTiles, int kTileCount, int kWarps, bool kTogether>
struct SegmentChunks {
  static constexpr bool kOnlyOne = false;
  int first, tiles, rounds;

  SegmentChunks() = default;
  __device__ __forceinline__ SegmentChunks(unsigned cta, unsigned ctas)
      : SegmentChunks(cta, ctas, static_cast<int>(threadIdx.x) / 32) {}
  __device__ __forceinline__ SegmentChunks(unsigned cta, unsigned ctas, int warp) {
    const int begin = static_cast<int>(kSegments * cta / ctas);
    const int end = static_cast<int>(kSegments * (cta + 1) / ctas);
    first = begin + warp;
    const int segments = first < end ? ceil_div(end - first, kWarps) : 0;
    const int last = first + (segments - 1) * kWarps;
    tiles = segments * kSegmentTiles - (last == kSegments - 1 ? kMissingTiles : 0);
    rounds = kTogether ? ceil_div(end - begin, kWarps) * kSegmentTiles : tiles;
  }
  __device__ __forceinline__ int count() const {
    return rounds;
  }
  __device__ __forceinline__ bool is_own(int chunk) const {
    return !kTogether || chunk < tiles;
  }
  __device__ __forceinline__ int segment(int chunk) const {
    return first + chunk / kSegmentTiles * kWarps;
  }
  __device__ __forceinline__ int first_tile(int chunk) const {
    return segment(chunk) * kSegmentTiles + chunk % kSegmentTiles;
  }
  __device__ __forceinline__ bool ends_segment(int chunk) const {
    return chunk % kSegmentTiles == kSegmentTiles - 1 || chunk == tiles - 1;
  }
  __device__ __forceinline__ bool holds(int pair) const {
    return true;
  }

 private:
  static constexpr int kMissingTiles = kSegments * kSegmentTiles - kTileCount;
  static_assert(kMissingTiles >= 0 && kMissingTiles < kSegmentTiles, "segments cover the tiles");
};

// The types of such a launch. C:
// - kKBlocks and kTileCount of the weight; kWeights, its storage;
// - kSegments, kSegmentTiles;
// - kWarps; kTokenTiles, groups of 8 rows of a CTA; kDepth, steps in flight;
// - kNormSlices, warps that normalize a row; kNormRounding; kSharedBytes.
template <class C>
struct HeadOfFew {
  using Units = typename WeightUnits<C::kWeights>::Units;
  using Shape = LinearShape<C::kKBlocks, C::kWarps, 1, 1, 1, C::kTokenTiles, C::kDepth, 0, Units>;
  using Chunks = SegmentChunks<C::kSegments, C::kSegmentTiles, C::kTileCount, C::kWarps, false>;
  using Fragments = TokenFragments<C::kKBlocks, C::kNormSlices, C::kTokenTiles>;
  static constexpr NormRounding kRounding = static_cast<NormRounding>(C::kNormRounding);
  static_assert(C::kSharedBytes == Fragments::kBytes + Fragments::kNormBytes, "as the launch says");
};

// The prologue normalizes the rows ``logit_rows[first_row …]`` of x into shared memory. The loop
// passes the logits of each tile to finish(chunk, sums): sums[0][n][i] is row g (i < 2) or g + 8 of
// the tile for token 8n + 2t + i % 2. between() runs after griddepcontrol.wait and before a
// barrier. normed(fragments) runs between the normalization of the warp's slice and the next
// barrier.
template <class Shape, class Fragments, NormRounding rounding, class Chunks, class Between,
          class Normed, class Finish>
__device__ __forceinline__ void stream_head(const uint16_t* x, const int* logit_rows,
                                            const uint16_t* norm,
                                            const typename Shape::Units::Stored* weight,
                                            const Chunks& chunks, unsigned char* shared,
                                            int first_row, int rows, float eps, Between between,
                                            Normed normed, Finish finish) {
  constexpr int kWidth = Shape::kBlocks * 32;
  const Fragments fragments(shared);
  WeightStream<Shape, Chunks> stream(weight, chunks, nullptr, 0);
  stream.start();
  Fragments::fetch_norm(shared + Fragments::kBytes, norm);
  cp_async_commit();
  pdl_wait();
  fragments.fetch(rows, [&](int row) {
    return x + static_cast<int64_t>(load_l2_int(logit_rows + first_row + row)) * kWidth;
  });
  cp_async_commit();
  between();
  cp_async_wait<0>();
  __syncwarp();
  fragments.template norm<rounding>(shared + Fragments::kBytes, eps);
  normed(fragments);
  __syncthreads();
  SharedTokens<Shape> input{fragments.at(0, 0)};
  stream.run(input, finish);
}
