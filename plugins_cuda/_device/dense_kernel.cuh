// The types of a dense kernel of up to 256 rows, from its compile-time constants: for more than a
// few tokens those of many_tokens.cuh (MANY_TOKENS) or, for more still, of many_panels.cuh (PANELS
// too), else those of dense_tokens.cuh.
#pragma once

#if MANY_TOKENS
#if PANELS
#include "many_panels.cuh"

using Shape = PanelShape<K_BLOCKS, GROUP_SLICES * SLICE_BLOCKS, SLICE_BLOCKS, 1,
                         TOKEN_TILES * kTokensPerTile, DEPTH>;
using Many = ManyPanels<Shape, TILE_COUNT, SLICES / GROUP_SLICES, CTAS, WARPS, STAGES>;
#else
#include "many_tokens.cuh"

using Shape = LinearShape<K_BLOCKS, WARPS, SLICES, GROUP_SLICES, 1, TOKEN_TILES, DEPTH, 0,
                          WeightUnits<WEIGHTS>::Units>;
using Many = ManyTokens<Shape, TILE_COUNT, CTAS>;
#endif
using Units = WeightUnits<WEIGHTS>::Units;
static_assert(SHARED_BYTES == Many::kBytes, "as the launch says");
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
