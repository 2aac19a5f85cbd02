// The tiles of tokens of a grouped prefill GEMM, which the sort writes.
#pragma once

#include "../../_device/types.cuh"

// workspace_tiles, ints: the number of tiles of tokens, the numbers of started tiles of gate/up and
// of down, one unused, then the TokenTiles.
constexpr int kTokenTiles = 0, kTakenGateUp = 1, kTakenDown = 2, kTilesHeader = 4;

struct alignas(16) TokenTile {
  int expert, first, live, unused;
};
