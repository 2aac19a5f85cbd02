// A dense kernel for many tokens: CTAs split K too. Tokens are fragments (many_tokens.cuh) or, for
// still more tokens, panels (many_panels.cuh).
#pragma once

#include "many_panels.cuh"
#include "many_tokens.cuh"
#include "stored_weights.cuh"

// C:
// - kKBlocks and kTileCount of the weight; kWeights, its storage;
// - kPanels, whether tokens are panels;
// - kWarps; kSlices of K; kGroupSlices of a CTA; with panels, kSliceBlocks;
// - kTokenTiles; kTokensReady, whether a previous launch writes the tokens in this form;
// - kDepth, the steps in flight; with panels, kStages;
// - kCtas and kSharedBytes.
template <class C, bool kPanels = C::kPanels != 0>
struct DenseMany {
  using Units = typename WeightUnits<C::kWeights>::Units;
  using Shape = LinearShape<C::kKBlocks, C::kWarps, C::kSlices, C::kGroupSlices, 1, C::kTokenTiles,
                            C::kDepth, 0, Units>;
  using Many = ManyTokens<Shape, C::kTileCount, C::kCtas>;
};
template <class C>
struct DenseMany<C, true> {
  using Units = typename WeightUnits<C::kWeights>::Units;
  using Shape = PanelShape<C::kKBlocks, C::kGroupSlices * C::kSliceBlocks, C::kSliceBlocks, 1,
                           C::kTokenTiles * kTokensPerTile, C::kDepth, Units>;
  using Many = ManyPanels<Shape, C::kTileCount, C::kSlices / C::kGroupSlices, C::kCtas, C::kWarps,
                          C::kStages, C::kTokensReady != 0>;
};

// Start to copy the tokens: rows of ``x``, or the result ``ready`` of a previous launch.
template <class C, class Many>
__device__ __forceinline__ auto fetched(const Many& many, unsigned char* shared, const uint16_t* x,
                                        const unsigned char* ready) {
  if constexpr (C::kTokensReady != 0) {
    return many.fetch_ready(shared, ready);
  } else {
    return many.fetch_rows(shared, x);
  }
}

// Run such a launch. ``outputs``: see GroupSums::emit_all(). waited(many) runs once the previous
// launches have finished. ``triggers_late``: the next launch starts no sooner (launches.py).
template <class C, bool triggers_late = false, class Outputs, class Waited>
__device__ __forceinline__ void project_many(const uint16_t* x,
                                             const typename DenseMany<C>::Units::Stored* weight,
                                             const unsigned char* ready, float* sums,
                                             unsigned* arrived, int rows, unsigned char* shared,
                                             const Outputs& outputs, const Waited& waited) {
  using Many = typename DenseMany<C>::Many;
  static_assert(C::kSharedBytes == Many::kBytes, "as the launch says");
  if (!triggers_late) pdl_launch_dependents();
  const Many many(rows);
  if constexpr (C::kPanels != 0 && C::kTokensReady == 0) {
    auto input = many.create_panels(shared);
    if (many.copies_rows()) {
      many.copy_rows(input, x);
      return;
    }
    registers_raise<Many::kRegisters>();
    typename Many::Stream stream = many.stream(weight);
    stream.start();
    pdl_wait();
    if (triggers_late) pdl_launch_dependents();
    waited(many);
    many.multiply(stream, input, shared, sums);
  } else {
    typename Many::Stream stream = many.stream(weight);
    stream.start();
    pdl_wait();
    auto input = fetched<C>(many, shared, x, ready);
    if (triggers_late) pdl_launch_dependents();
    waited(many);
    many.multiply(stream, input, shared, sums);
  }
  // Constructed again, so that it occupies no registers during the products.
  typename Many::Sums(rows, cta_index()).emit_all(sums, arrived, outputs);
}
