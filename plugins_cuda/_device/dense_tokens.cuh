// The tokens of a CTA whose warps split K, and the loop over its weights.
#pragma once

#include "slice_sums.cuh"

// The shared memory of a CTA. Partial sums follow the other buffers. With kOverlay they replace the
// fragments, if each warp has finished reading its fragments by then. kRows: stored tokens of a
// group of 8. kHeld: chunks with partial sums.
template <class Shape_, bool kFragments, bool kNormed, bool kOverlay, int kRows = kTokensPerTile,
          int kHeld = 1>
struct DensePlaces {
  using Shape = Shape_;
  using Fragments = TokenFragments<Shape::kBlocks, Shape::kSlices, Shape::kTokenTiles, kRows>;
  static constexpr int kNorm = kFragments ? Fragments::kBytes : 0;
  static constexpr int kTokenBytes = kNorm + (kNormed ? Fragments::kNormBytes : 0);
  static constexpr int kPartials = kOverlay ? 0 : kTokenBytes;
  static constexpr int kPartialStride =
      kOverlay ? Fragments::kSliceBytes : Shape::kWarpPartialBytes;
  static constexpr int kRing = kTokenBytes + (kOverlay ? 0 : kHeld * Shape::kPartialBytes);
  static constexpr int kBytes = kRing + Shape::kRingBytes;
  static_assert(kFragments || !kNormed, "the norm needs fragments");
  static_assert(!kOverlay || Shape::kWarpPartialBytes <= Fragments::kSliceBytes, "overlay fits");
};

// Call it after griddepcontrol.wait. It runs the weight stream over ``live`` tokens with all
// columns, the first at ``tokens``. The norm's weight was copied by fetch_norm() and committed.
// between() runs while the tokens arrive.
template <class Places, bool kFragments, bool kNormed, NormRounding rounding, class Stream,
          class Between, class Finish>
__device__ __forceinline__ void stream_tokens(Stream& stream, unsigned char* shared,
                                              const uint16_t* tokens, int live, float eps,
                                              Between between, Finish finish) {
  using Shape = typename Places::Shape;
  constexpr int kWidth = Shape::kBlocks * 32;
  if constexpr (kFragments) {
    const typename Places::Fragments fragments(shared);
    fragments.fetch(live, [&](int token) { return tokens + static_cast<int64_t>(token) * kWidth; });
    cp_async_commit();
    stream.start_ring();
    between();
    cp_async_wait<Stream::kLate>();
    // Wait for copies of other lanes: the norm's weight, and the bytes that partial sums replace.
    __syncwarp();
    if constexpr (kNormed) {
      fragments.template norm<rounding>(shared + Places::kNorm, eps);
      if constexpr (!Places::Fragments::kWhole) __syncwarp();  // lanes read bytes of others
    }
    SharedTokens<Shape, Places::Fragments::kBlockBytes> input{
        fragments.at(slice_of_warp<Shape>() * Shape::kSliceBlocks, 0)};
    stream.run(input, finish);
  } else {
    GlobalTokens<Shape> input(tokens, kWidth, live);
    stream.fetch(input);
    stream.start_ring();
    between();
    stream.run(input, finish);
  }
}
