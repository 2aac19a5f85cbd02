// Which tiles of positions a CTA of latent attention walks over, and where their entries lie.
//
// Constants of the kernel: ENTRY (values of a token in the cache), TILE (positions of a tile, 32 or
// 64), PAGE_SIZE, TABLE, WORDS, WINDOW, SPLIT, GROUPS, CONTEXT_CTAS, ROWS (of the CTA, 1 or 2),
// LISTED (a row's list of slots stands for the context: DSA).
//
// Tile c is the positions TILE·c … TILE·c + TILE − 1, and belongs to slot c mod SPLIT, which is one
// of group slot mod GROUPS. A row's slots join group by group, those of a group in order. CTAs take
// single slots each, or where they are few whole groups, of which they leave one state. A row with
// ancestors in the tree has tiles of its own from tree_start's on, in which entries stand where
// they will once they are committed; where a CTA has one row only, all of its tiles are such. With
// a list its entry i stands at position i, wherever its slot is: tiles, slots and joins are those
// of a context of so many tokens, so that a list of everything gives the bits of the whole context.
// A tile in shared memory is [panels of 64 values][TILE tokens][128 bytes] in the 128-byte swizzle:
// that of a wgmma's B operand (ptx_wgmma.cuh).
#pragma once

#include "attention_rows.cuh"
#include "ptx_attention.cuh"

constexpr int kTile = TILE;
constexpr int kLatentThreads = 256;
constexpr int kEntryUnits = ENTRY / 8;  // of 16 bytes
constexpr int kEntryPanels = ceil_div(ENTRY, 64);
constexpr int kPanelUnits = kTile * 8;
constexpr int kStageUnits = kEntryPanels * kPanelUnits;
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;
constexpr int kNowhere = 1 << 30, kNoTile = kNowhere / TILE;
static_assert(ENTRY % 16 == 0 && (TILE == 32 || TILE == 64), "wgmma takes 16 values at once");
constexpr bool kWholeGroups = CONTEXT_CTAS <= GROUPS && GROUPS < SPLIT;
static_assert((SPLIT & (SPLIT - 1)) == 0 && ROWS <= 2, "slots are found by masks");
static_assert(SPLIT % GROUPS == 0, "groups have as many slots each");
static_assert(!LISTED || (ROWS == 1 && WINDOW == 0), "what a row sees is in a list of its own");

// The slot after one of a CTA's, or SPLIT.
__device__ __forceinline__ int next_slot(int slot) {
  if (!kWholeGroups) return min(slot + CONTEXT_CTAS, SPLIT);
  if (slot + GROUPS < SPLIT) return slot + GROUPS;
  const int group = slot % GROUPS + CONTEXT_CTAS;
  return group < GROUPS ? group : SPLIT;
}

// Where a slot's state stands in the workspaces.
__device__ __forceinline__ int place_of_slot(int slot) {
  return kWholeGroups ? slot % GROUPS : slot;
}

// threadIdx.x, read anew: what is made of it is not kept in registers from one tile to the next, of
// which there are too few.
__device__ __forceinline__ int thread_index() {
#ifdef SPECBUILD_EMULATE
  return static_cast<int>(threadIdx.x);
#else
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
#endif
}

// Where a 16-byte unit of a token stands in a tile, in units.
__device__ __forceinline__ int entry_unit(int token, int unit) {
  return unit / 8 * kPanelUnits + token * 8 + ((unit % 8) ^ (token % 8));
}

// Positions first … last.
struct Span {
  int first, last;

  __device__ __forceinline__ bool holds(int position) const {
    return position >= first && position <= last;
  }
};

// A CTA's rows of a sequence; those past the last see nothing.
struct LatentRows {
  RowView view[ROWS];
  int shared_last[ROWS];  // the last position that each sees in tiles of all rows
  const int* bits[ROWS];  // of its ancestors
  int count, tree_start;
  int first, shared_end;  // positions of the tiles of all rows
  const int* list;        // of the only row, LISTED; `own` is its slot
  int own;

  __device__ __forceinline__ void open(int first_row, int rows, const int* row_slot,
                                       int sequence_tree_start, const int* ancestor_bits) {
    count = rows;
    tree_start = sequence_tree_start;
    first = kNowhere;
    shared_end = -1;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int row = first_row + min(r, rows - 1);
      bits[r] = ancestor_bits + static_cast<int64_t>(row) * WORDS;
      view[r] = view_of<WORDS, WINDOW>(row_slot[row], tree_start, bits[r]);
      if (r >= rows) view[r] = {kNowhere, -1, tree_start, -1};
      const bool alone = ROWS > 1 && view[r].last >= 0;
      shared_last[r] = alone ? tree_start / kTile * kTile - 1 : view[r].end();
      first = min(first, view[r].first);
      shared_end = max(shared_end, shared_last[r]);
    }
  }

  // The only row, LISTED, with the first `entries` of a list.
  __device__ __forceinline__ void open_list(int row, const int* row_slot, int sequence_tree_start,
                                            const int* ancestor_bits, const int* slots,
                                            int entries) {
    count = 1;
    tree_start = sequence_tree_start;
    list = slots;
    own = row_slot[row];
    bits[0] = ancestor_bits + static_cast<int64_t>(row) * WORDS;
    first = 0;
    shared_end = shared_last[0] = entries - 1;
    view[0] = {0, entries - 1, tree_start, -1};
  }

  // The slot of an entry of the list, or −1 where the row does not see it.
  __device__ __forceinline__ int listed_slot(int entry) const {
    const int slot = entry <= shared_end ? list[entry] : -1;
    if (slot < tree_start) return slot <= own ? slot : -1;
    const int node = slot - tree_start;
    if (node >= 32 * WORDS) return -1;
    return static_cast<uint32_t>(bits[0][node / 32]) >> (node % 32) & 1u ? slot : -1;
  }

  // Where the token stands that has a place in a tile.
  __device__ __forceinline__ int position_of(int place) const {
    if (!LISTED) return place;
    const int slot = listed_slot(place);
    if (slot < tree_start) return max(slot, 0);
    return tree_start + bits_below<WORDS>(bits[0], slot - tree_start);
  }

  // What row r sees of a tile of all rows (owner 0) or of row owner − 1.
  __device__ __forceinline__ Span span(int r, int owner) const {
    if (owner == 0) return {view[r].first, shared_last[r]};
    if (owner != r + 1) return {0, -1};
    return {view[r].first, view[r].last};
  }

  // What some row sees of it.
  __device__ __forceinline__ Span any_span(int owner) const {
    if (owner == 0) return {first, shared_end};
    return ROWS > 1 && owner == 2 ? span(ROWS - 1, 2) : span(0, 1);
  }

  // The view slot of a position.
  __device__ __forceinline__ int slot_of(int position, int owner) const {
    const bool second = ROWS > 1 && owner == 2;
    const bool lineage = ROWS == 1 ? view[0].last >= 0 : owner > 0;
    if (!lineage || position < tree_start) return position;
    const int* ancestors = second ? bits[ROWS - 1] : bits[0];
    return tree_start + set_bit<WORDS>(ancestors, position - tree_start);
  }
};

// A place in a CTA's list of tiles: those of all rows, then of each row alone, slot by slot.
struct TileCursor {
  int owner;  // see LatentRows::span
  int tile;   // kNoTile: there are no more

  __device__ __forceinline__ bool ended() const {
    return tile == kNoTile;
  }
  __device__ __forceinline__ int slot() const {
    return ended() ? SPLIT : tile & (SPLIT - 1);
  }
};

struct LatentWalk {
  LatentRows rows;
  const int* table;  // of this sequence

  __device__ __forceinline__ TileCursor begin() const {
    TileCursor at{0, first_tile(blockIdx.x, 0)};
    settle(at, blockIdx.x);
    return at;
  }

  __device__ __forceinline__ void advance(TileCursor& at) const {
    const int slot = at.slot();
    at.tile += SPLIT;
    settle(at, slot);
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
    return from + ((slot - from) & (SPLIT - 1));
  }

  // From behind an owner's last tile of a slot to the next tile that there is.
  __device__ __forceinline__ void settle(TileCursor& at, int slot) const {
    constexpr int kOwners = ROWS == 1 ? 1 : 1 + ROWS;
    while (at.tile * kTile > own_tiles(at.owner).last) {
      if (++at.owner == kOwners) {
        at.owner = 0;
        slot = next_slot(slot);
        if (slot >= SPLIT) {
          at.tile = kNoTile;
          return;
        }
      }
      at.tile = min(first_tile(slot, at.owner), kNoTile);
    }
  }

  __device__ __forceinline__ int entry_at(int position, const TileCursor& at) const {
    if (at.ended() || !rows.any_span(at.owner).holds(position)) return -1;
    const int slot = LISTED ? rows.listed_slot(position) : rows.slot_of(position, at.owner);
    if (LISTED && slot < 0) return -1;
    return table[slot / PAGE_SIZE] * PAGE_SIZE + slot % PAGE_SIZE;
  }
};
