// Which tiles of positions a CTA of latent attention walks over, and where their entries lie.
//
// Config: those of latent_rows.cuh, PAGE_SIZE, TABLE, VIEWED (a sequence's pages
// are some of its own: SpecPV), SPLIT, GROUPS, CONTEXT_CTAS.
//
// A tile (latent_rows.cuh) belongs to slot c mod SPLIT, which is one of group slot mod GROUPS. A
// row's slots join group by group, those of a group in order. CTAs take single slots each, or where
// they are few whole groups, of which they leave one state.
#pragma once

#include "config.cuh"
#include "latent_rows.cuh"

constexpr int kLatentThreads = 256;
constexpr int kNoTile = kNowhere / Config::kTile;
constexpr bool kWholeGroups =
    Config::kContextCtas <= Config::kGroups && Config::kGroups < Config::kSplit;
static_assert((Config::kSplit & (Config::kSplit - 1)) == 0 && Config::kRows <= 2,
              "slots are found by masks");
static_assert(Config::kSplit % Config::kGroups == 0, "groups have as many slots each");
static_assert(!Config::kListed || (Config::kRows == 1 && Config::kWindow == 0),
              "what a row sees is in a list of its own");

// The slot after one of a CTA's, or SPLIT.
__device__ __forceinline__ int next_slot(int slot) {
  if (!kWholeGroups) return min(slot + Config::kContextCtas, Config::kSplit);
  if (slot + Config::kGroups < Config::kSplit) return slot + Config::kGroups;
  const int group = slot % Config::kGroups + Config::kContextCtas;
  return group < Config::kGroups ? group : Config::kSplit;
}

// Where a slot's state stands in the workspaces.
__device__ __forceinline__ int place_of_slot(int slot) {
  return kWholeGroups ? slot % Config::kGroups : slot;
}

// A place in a CTA's list of tiles: those of all rows, then of each row alone, slot by slot.
struct TileCursor {
  int owner;  // see LatentRows::span
  int tile;   // kNoTile: there are no more

  __device__ __forceinline__ bool ended() const {
    return tile == kNoTile;
  }
  __device__ __forceinline__ int slot() const {
    return ended() ? Config::kSplit : tile & (Config::kSplit - 1);
  }
};

// A walk over what ``rows`` see: LatentRows, or any that have kOwners, any_span(owner),
// slot_of(position, owner), position_of(place) and tree_start.
template <class Rows>
struct WalkOf {
  Rows rows;
  const int* table;   // of this sequence
  const int* begins;  // where its pages stand, VIEWED

  __device__ __forceinline__ TileCursor begin() const {
    TileCursor at{0, first_tile(blockIdx.x, 0)};
    settle(at, blockIdx.x);
    return at;
  }

  __device__ __forceinline__ void advance(TileCursor& at) const {
    const int slot = at.slot();
    at.tile += Config::kSplit;
    settle(at, slot);
  }

  // The pool's entry of a position of a tile; −1 where nobody sees it.
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

  // Where in the sequence the token stands that has a place in a tile: in a view, whose pages do
  // not adjoin, behind the first slot of its page, or in the tree behind where that begins.
  __device__ __forceinline__ int position_of(int place) const {
    const int position = rows.position_of(place);
    if (!Config::kViewed) return position;
    const int from = min(position, rows.tree_start);
    return begins[min(from / Config::kPageSize, Config::kTable - 1)] + from % Config::kPageSize +
           position - from;
  }

  // The pool's entries of this lane's two tokens of a tile; −1 where nobody sees them.
  __device__ __forceinline__ int2 look_up(const TileCursor& at) const {
    const int position = at.tile * kTile + thread_index() % 32;
    return make_int2(entry_at(position, at), kTile > 32 ? entry_at(position + 32, at) : -1);
  }

  // Starts the copies of a tile. What no row sees becomes zeros: a weight of 0 silences no NaN.
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

  __device__ __forceinline__ int first_tile(int slot, int owner) const {
    const int from = own_tiles(owner).first / kTile;
    return from + ((slot - from) & (Config::kSplit - 1));
  }

  // From behind an owner's last tile of a slot to the next tile that there is.
  __device__ __forceinline__ void settle(TileCursor& at, int slot) const {
    while (at.tile * kTile > own_tiles(at.owner).last) {
      if (++at.owner == Rows::kOwners) {
        at.owner = 0;
        slot = next_slot(slot);
        if (slot >= Config::kSplit) {
          at.tile = kNoTile;
          return;
        }
      }
      at.tile = min(first_tile(slot, at.owner), kNoTile);
    }
  }
};

using LatentWalk = WalkOf<LatentRows>;
