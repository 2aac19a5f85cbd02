// The head for many normalized rows, which are panels that all warps of a CTA share
// (panel_product.cuh).
//
// A warp processes kTiles segments of the vocabulary at once, a tile of each. From L2 an SM reads
// its weights once, and the rows once per kWarps · kTiles tiles. A panel of 64 rows has 8 KB, the
// weights that it multiplies 32 KB.
#pragma once

#include "head_stream.cuh"
#include "panel_product.cuh"

// The segments of kWarps · kTiles virtual warps, distributed as in head_stream.cuh. Warp w
// processes those of the virtual warps w, w + kWarps, …
template <int kSegments, int kSegmentTiles, int kTileCount, int kWarps, int kTiles>
struct PanelChunks {
  using Own = SegmentChunks<kSegments, kSegmentTiles, kTileCount, kWarps * kTiles, true>;
  Own own[kTiles];

  __device__ __forceinline__ PanelChunks(unsigned cta, unsigned ctas) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      own[t] = Own(cta, ctas, static_cast<int>(threadIdx.x) / 32 + t * kWarps);
    }
  }
  __device__ __forceinline__ int count() const {
    return own[0].count();
  }
  __device__ __forceinline__ int tile(int round, int t) const {
    return own[t].is_own(round) ? own[t].first_tile(round) : -1;
  }
};

// The types of such a launch. C:
// - kKBlocks and kTileCount of the weight; kWeights, its storage;
// - kSegments, kSegmentTiles;
// - kWarps; kTiles, which a warp processes at once; kTokenTiles, groups of 8 rows of a CTA;
// - kDepth, steps in flight; kStages of the panels.
template <class C>
struct HeadOfPanels {
  static constexpr int kColumns = C::kTokenTiles * kTokensPerTile;
  using Units = typename WeightUnits<C::kWeights>::Units;
  using Shape =
      PanelShape<C::kKBlocks, C::kKBlocks, C::kKBlocks, C::kTiles, kColumns, C::kDepth, Units>;
  using Chunks = PanelChunks<C::kSegments, C::kSegmentTiles, C::kTileCount, C::kWarps, C::kTiles>;
  using Panels = PanelStream<kColumns, Shape::kPanels, C::kStages, C::kWarps>;
};

// The prologue and loop over the rows that normed_tokens() wrote to ``tokens`` as panels. They pass
// the logits of a round's tiles to finish(round, sums). between() runs after griddepcontrol.wait
// and before a barrier.
template <class Shape, class Panels, class Chunks, class Between, class Finish>
__device__ __forceinline__ void stream_head_panels(const unsigned char* tokens,
                                                   const typename Shape::Units::Stored* weight,
                                                   const Chunks& chunks, unsigned char* shared,
                                                   typename Panels::Barriers& barriers,
                                                   Between between, Finish finish) {
  PanelProduct<Shape, Chunks> product(weight, chunks, 0, Shape::kBlocks);
  product.start();
  Panels panels(shared, barriers, Shape::kPanels);
  pdl_wait();
  panels.start(tokens, chunks.count());
  between();
  __syncthreads();
  product.run(panels, finish);
}
