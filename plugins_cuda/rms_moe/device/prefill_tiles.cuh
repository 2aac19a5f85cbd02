// The tiles of tokens of a grouped prefill GEMM, as the sort leaves them for the GEMMs.
#pragma once

#include "../../_device/types.cuh"

// workspace_tiles, ints: how many tiles of tokens there are, the tiles of gate/up and of down that
// are taken, one unused, then one TokenTile each.
constexpr int kTokenTiles = 0, kTakenGateUp = 1, kTakenDown = 2, kTilesHeader = 4;

struct alignas(16) TokenTile {
  int expert, first, live, unused;
};
