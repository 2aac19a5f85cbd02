// The tiles of positions that a CTA of latent attention processes, and the addresses of their
// entries.
//
// Config: the members of latent_rows.cuh, PAGE_SIZE, TABLE, VIEWED (the pages of a view are not
// adjacent: SpecPV), SPLIT, GROUPS, CONTEXT_CTAS.
//
// Tile c (latent_rows.cuh) belongs to split c mod SPLIT, which belongs to group split mod GROUPS.
// The splits of a group are merged in order, then the groups. CTAs process single splits, or
// complete groups if there are few CTAs; a complete group has one state.
#pragma once

#include "config.cuh"
#include "latent_rows.cuh"

constexpr int kLatentThreads = 256;
constexpr int kNoTile = kNowhere / Config::kTile;
constexpr bool kWholeGroups =
    Config::kContextCtas <= Config::kGroups && Config::kGroups < Config::kSplit;
static_assert((Config::kSplit & (Config::kSplit - 1)) == 0 && Config::kRows <= 2,
              "splits are computed with masks");
static_assert(Config::kSplit % Config::kGroups == 0, "groups have equally many splits");
static_assert(!Config::kListed || (Config::kRows == 1 && Config::kWindow == 0),
              "a row with a list has separate tiles");

// The next split of a CTA after this one, or SPLIT.
__device__ __forceinline__ int next_split(int split) {
  if (!kWholeGroups) return min(split + Config::kContextCtas, Config::kSplit);
  if (split + Config::kGroups < Config::kSplit) return split + Config::kGroups;
  const int group = split % Config::kGroups + Config::kContextCtas;
  return group < Config::kGroups ? group : Config::kSplit;
}

// The place of a split's state in the workspaces.
__device__ __forceinline__ int place_of_split(int split) {
  return kWholeGroups ? split % Config::kGroups : split;
}

// A position in a CTA's list of tiles: shared tiles, then those of each row, split by split.
struct TileCursor {
  int owner;  // see LatentRows::span
  int tile;   // kNoTile after the last

  __device__ __forceinline__ bool ended() const {
    return tile == kNoTile;
  }
  __device__ __forceinline__ int split() const {
    return ended() ? Config::kSplit : tile & (Config::kSplit - 1);
  }
};

// A walk over the visible tiles of ``rows``: LatentRows, or a type with kOwners, any_span(owner),
// slot_of(position, owner), position_of(place) and tree_start.
template <class Rows>
struct WalkOf {
  Rows rows;
  const int* table;   // of this sequence
  const int* begins;  // the first positions of its pages, if VIEWED

  __device__ __forceinline__ TileCursor begin() const {
    TileCursor at{0, first_tile(blockIdx.x, 0)};
    settle(at, blockIdx.x);
    return at;
  }

  __device__ __forceinline__ void advance(TileCursor& at) const {
    const int split = at.split();
    at.tile += Config::kSplit;
    settle(at, split);
  }

  // Return the pool entry of a position of a tile; −1 if it is invisible.
  __device__ __forceinline__ int entry_at(int position, const TileCursor& at) const {
    if (at.ended() || !rows.any_span(at.owner).holds(position)) return -1;
    int slot;
    if constexpr (Config::kListed) {
      slot = rows.listed_slot(position);
      if (slot < 0) return -1;
    } else {
      slot = rows.slot_of(position, at.owner);
    }
    return table[slot / Config::kPageSize] * Config::kPageSize + slot % Config::kPageSize;
  }

  // Return the position in the sequence of a token at a place of a tile. In a view, whose pages are
  // not adjacent, it follows from the first slot of its page, or of the tree.
  __device__ __forceinline__ int position_of(int place) const {
    const int position = rows.position_of(place);
    if (!Config::kViewed) return position;
    const int from = min(position, rows.tree_start);
    return begins[min(from / Config::kPageSize, Config::kTable - 1)] + from % Config::kPageSize +
           position - from;
  }

  // Return the pool entries of this lane's two tokens of a tile; −1 if invisible.
  __device__ __forceinline__ int2 look_up(const TileCursor& at) const {
    const int position = at.tile * kTile + thread_index() % 32;
    return make_int2(entry_at(position, at), kTile > 32 ? entry_at(position + 32, at) : -1);
  }

  // Start to copy a tile. Invisible tokens become zeros, because a weight of 0 does not cancel NaN.
  __device__ __forceinline__ void fetch(const uint4* c_pool, int2 entries, uint4* stage) const {
    constexpr int kUnits = kTile * kEntryUnits, kCopies = ceil_div(kUnits, kLatentThreads);
    const int thread = thread_index();
#pragma unroll 1
    for (int i = 0; i < kCopies; ++i) {
      const int at = i * kLatentThreads + thread;
      const int token = at / kEntryUnits % kTile, unit = at % kEntryUnits;
      const int low = __shfl_sync(kAllLanes, entries.x, token % 32);
      const int high = __shfl_sync(kAllLanes, entries.y, token % 32);
      const int entry = token < 32 ? low : high;
      if (kUnits % kLatentThreads != 0 && at >= kUnits) continue;
      const uint4* from = c_pool + static_cast<int64_t>(max(entry, 0)) * kEntryUnits + unit;
      cp_async_16_or_zero(stage + entry_unit(token, unit), from, entry >= 0);
    }
  }

 private:
  __device__ __forceinline__ Span own_tiles(int owner) const {
    const Span sees = rows.any_span(owner);
    return owner == 0 ? sees : Span{max(sees.first, rows.tree_start), sees.last};
  }

  __device__ __forceinline__ int first_tile(int split, int owner) const {
    const int from = own_tiles(owner).first / kTile;
    return from + ((split - from) & (Config::kSplit - 1));
  }

  // Advance from the end of an owner's tiles of a split to the next existing tile.
  __device__ __forceinline__ void settle(TileCursor& at, int split) const {
    while (at.tile * kTile > own_tiles(at.owner).last) {
      if (++at.owner == Rows::kOwners) {
        at.owner = 0;
        split = next_split(split);
        if (split >= Config::kSplit) {
          at.tile = kNoTile;
          return;
        }
      }
      at.tile = min(first_tile(split, at.owner), kNoTile);
    }
  }
};

using LatentWalk = WalkOf<LatentRows>;
