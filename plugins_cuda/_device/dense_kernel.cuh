// The types of a dense kernel of up to 256 rows, from its compile-time constants: for more than a
// few tokens those of many_tokens.cuh (MANY_TOKENS) or, for more still, of many_panels.cuh (PANELS
// too), else those of dense_tokens.cuh.
#pragma once

#if MANY_TOKENS
#if PANELS
#include "many_panels.cuh"

using Shape = PanelShape<K_BLOCKS, GROUP_SLICES * SLICE_BLOCKS, SLICE_BLOCKS, 1,
                         TOKEN_TILES * kTokensPerTile, DEPTH, WeightUnits<WEIGHTS>::Units>;
using Many =
    ManyPanels<Shape, TILE_COUNT, SLICES / GROUP_SLICES, CTAS, WARPS, STAGES, TOKENS_READY != 0>;
#else
#include "many_tokens.cuh"

using Shape = LinearShape<K_BLOCKS, WARPS, SLICES, GROUP_SLICES, 1, TOKEN_TILES, DEPTH, 0,
                          WeightUnits<WEIGHTS>::Units>;
using Many = ManyTokens<Shape, TILE_COUNT, CTAS>;
#endif
using Units = WeightUnits<WEIGHTS>::Units;
static_assert(SHARED_BYTES == Many::kBytes, "as the launch says");

// A launch of many tokens, which a launch in front left at ``ready`` or which are rows of ``x``.
// ``outputs``: as GroupSums::emit_all() takes them; waited(many) runs once the launches in front
// are done. ``triggers_late``: launches behind this one start no sooner (launches.py).
template <bool triggers_late = false, class Outputs, class Waited>
__device__ __forceinline__ void project_many(const uint16_t* x, const Units::Stored* weight,
                                             const unsigned char* ready, float* sums,
                                             unsigned* arrived, int rows, unsigned char* shared,
                                             const Outputs& outputs, const Waited& waited) {
  if (!triggers_late) pdl_launch_dependents();
  const Many many(rows);
#if PANELS && !TOKENS_READY
  auto input = many.stand_rows(shared);
  if (many.brings_rows()) {
    many.bring_rows(input, x);
    return;
  }
  registers_raise<Many::kRegisters>();
#endif
  Many::Stream stream = many.stream(weight);
  stream.start();
#if TOKENS_READY
  pdl_wait();
  auto input = many.fetch_ready(shared, ready);
#elif PANELS
  pdl_wait();
#else
  pdl_wait();
  auto input = many.fetch_rows(shared, x);
#endif
  if (triggers_late) pdl_launch_dependents();
  waited(many);
  many.multiply(stream, input, shared, sums);
  // Made anew, so that nothing of it has to be held while the products run.
  Many::Sums(rows, cta_index()).emit_all(sums, arrived, outputs);
}
#else
#include "dense_tokens.cuh"

using Units = WeightUnits<WEIGHTS>::Units;
using Shape =
    LinearShape<K_BLOCKS, WARPS, SLICES, GROUP_SLICES, TILES, TOKEN_TILES, DEPTH, RING, Units>;
using Chunks = CtaChunks<TILES, ONE_CHUNK != 0>;
using Stream = WeightStream<Shape, Chunks>;

// Whether no thread has another pair of outputs than its first.
constexpr bool kAllEarly = ONE_CHUNK && Shape::kOneElement;
#endif
