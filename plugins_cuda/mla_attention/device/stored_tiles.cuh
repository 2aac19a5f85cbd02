// Keys that are rebuilt once for all rows of a sequence: the existing tiles and their addresses.
//
// Config: the members of latent_walk.cuh, KV_HEADS, WIDTH, BATCH, TILES (of a sequence's capacity),
// OWN_TILES (the maximum of a row with ancestors in a tree).
//
// The shared tiles of a sequence are stored by their index, followed by the separate tiles of its
// rows (latent_rows.cuh). A stored tile is [feature groups][heads of a group][TILE / 8][WIDTH /
// 16][lanes], the B operands of latent_scores.cuh.
#pragma once

#include "config.cuh"
#include "latent_keys.cuh"

namespace {

constexpr int kKeyUnits = kCtaFeatures * kTile / 8;  // of 16 bytes, of a tile and feature group

// The rows of a sequence from one on, ``max_rows`` of them, with their last visible positions.
template <int max_rows>
struct StoredRows {
  static constexpr int kOwners = 1 + max_rows;

  int shared_end;      // of the shared tiles
  int last[max_rows];  // of each row's separate tiles, or −1
  int tree_start;
  const int* bits;  // of the first row's ancestors

  __device__ __forceinline__ Span any_span(int owner) const {
    int end = shared_end;
#pragma unroll
    for (int row = 0; row < max_rows; ++row) end = owner == row + 1 ? last[row] : end;
    return {0, end};
  }

  __device__ __forceinline__ int slot_of(int position, int owner) const {
    if (owner == 0 || position < tree_start) return position;
    return tree_start +
           set_bit<Config::kWords>(bits + (owner - 1) * Config::kWords, position - tree_start);
  }

  __device__ __forceinline__ int position_of(int place) const {
    return place;
  }
};

// The offset of a stored tile of a feature group, in units of 16 bytes. ``row`` is the row of the
// launch that owns it.
__device__ __forceinline__ int64_t stored_tile(int sequence, int row, const TileCursor& at,
                                               int tree_start, int group) {
  const int place = at.owner == 0 ? sequence * Config::kTiles + at.tile
                                  : Config::kBatch * Config::kTiles + row * Config::kOwnTiles +
                                        at.tile - tree_start / kTile;
  return (static_cast<int64_t>(place) * kFeatureGroups + group) * kKeyUnits;
}

// Whether a row is whole: there are no lists, or its list is the mark.
__device__ __forceinline__ bool sees_everything(const int* selected, int held, int row) {
  return selected == nullptr || selected[static_cast<int64_t>(row) * held] == -2;
}

}  // namespace
