// The visible positions of rows of latent attention, and the layout of a tile of latents.
//
// Config: ENTRY (values of a token in the cache), TILE (positions of a tile, 32 or 64), WORDS,
// WINDOW, ROWS (of the CTA, or of one of several attending warpgroups: 1 or 2), LISTED (a row's
// list of slots replaces the context: DSA).
//
// Tile c has positions TILE·c … TILE·c + TILE − 1. From tree_start's tile on, a row with ancestors
// in the tree has separate tiles, in which entries are at the positions that they will have after
// the commit. If a CTA has one row only, all of its tiles are separate.
//
// With a list, entry i is at position i, regardless of its slot. Tiles, splits and merges are those
// of a context of that length, so that a list of all slots gives the bits of full attention.
//
// A tile in shared memory is [panels of 64 values][TILE tokens][128 bytes] in the 128-byte swizzle
// of a wgmma's B operand (ptx_wgmma.cuh).
#pragma once

#include "../../_device/attention_rows.cuh"
#include "../../_device/ptx_attention.cuh"
#include "config.cuh"

constexpr int kTile = Config::kTile;
constexpr int kEntryUnits = Config::kEntry / 8;  // of 16 bytes
constexpr int kEntryPanels = ceil_div(Config::kEntry, 64);
constexpr int kPanelUnits = kTile * 8;
constexpr int kStageUnits = kEntryPanels * kPanelUnits;
constexpr int kNowhere = 1 << 30;
static_assert(Config::kEntry % 16 == 0 && (Config::kTile == 32 || Config::kTile == 64),
              "wgmma processes 16 values at once");
static_assert(!Config::kListed || (Config::kRows == 1 && Config::kWindow == 0),
              "a row with a list has separate tiles");

// threadIdx.x, read again. Values derived from it are not kept in registers between tiles, because
// there are too few.
__device__ __forceinline__ int thread_index() {
#ifdef SPECBUILD_EMULATE
  return static_cast<int>(threadIdx.x);
#else
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
#endif
}

// The index of a 16-byte unit of a token in a tile.
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

// The inputs that determine the rows of a launch and their visible keys.
struct RowInputs {
  const int* page_table;
  const int* row_start;
  const int* row_slot;
  const int* tree_start;
  const int* ancestor_bits;

  __device__ __forceinline__ const int* bits(int row) const {
    return ancestor_bits + static_cast<int64_t>(row) * Config::kWords;
  }

  __device__ __forceinline__ RowView view(int sequence, int row) const {
    return view_of<Config::kWords, Config::kWindow>(row_slot[row], tree_start[sequence], bits(row));
  }
};

// Return the last position that a row with this view attends to in shared tiles.
__device__ __forceinline__ int shared_last_of(const RowView& view) {
  return view.last >= 0 ? view.tree_start / kTile * kTile - 1 : view.end();
}

// The rows of a CTA, of one sequence; rows past the last attend to nothing.
struct LatentRows {
  static constexpr int kOwners = Config::kRows == 1 ? 1 : 1 + Config::kRows;
  RowView view[Config::kRows];
  int shared_last[Config::kRows];  // the last visible position of each row in shared tiles
  const int* bits[Config::kRows];  // of its ancestors
  int count, tree_start;
  int first, shared_end;  // positions of the shared tiles
  const int* list;        // of the only row, if LISTED; `own` is its slot
  int own;

  __device__ __forceinline__ void open(int first_row, int rows, const RowInputs& in,
                                       int sequence_tree_start) {
    count = rows;
    tree_start = sequence_tree_start;
    first = kNowhere;
    shared_end = -1;
#pragma unroll
    for (int r = 0; r < Config::kRows; ++r) {
      const int row = first_row + min(r, rows - 1);
      bits[r] = in.bits(row);
      view[r] = view_of<Config::kWords, Config::kWindow>(in.row_slot[row], tree_start, bits[r]);
      if (r >= rows) view[r] = {kNowhere, -1, tree_start, -1};
      shared_last[r] = Config::kRows > 1 ? shared_last_of(view[r]) : view[r].end();
      first = min(first, view[r].first);
      shared_end = max(shared_end, shared_last[r]);
    }
  }

  // Open the only row, if LISTED, with the first `entries` of a list.
  __device__ __forceinline__ void open_list(int row, const RowInputs& in, int sequence_tree_start,
                                            const int* slots, int entries) {
    count = 1;
    tree_start = sequence_tree_start;
    list = slots;
    own = in.row_slot[row];
    bits[0] = in.bits(row);
    first = 0;
    shared_end = shared_last[0] = entries - 1;
    view[0] = {0, entries - 1, tree_start, -1};
  }

  // Return the slot of an entry of the list, or −1 if it is invisible to the row.
  __device__ __forceinline__ int listed_slot(int entry) const {
    const int slot = entry <= shared_end ? list[entry] : -1;
    if (slot < tree_start) return slot <= own ? slot : -1;
    const int node = slot - tree_start;
    if (node >= 32 * Config::kWords) return -1;
    return static_cast<uint32_t>(bits[0][node / 32]) >> (node % 32) & 1u ? slot : -1;
  }

  // Return the position of the token at a place of a tile.
  __device__ __forceinline__ int position_of(int place) const {
    if (!Config::kListed) return place;
    const int slot = listed_slot(place);
    if (slot < tree_start) return max(slot, 0);
    return tree_start + bits_below<Config::kWords>(bits[0], slot - tree_start);
  }

  // Return the visible positions of row r in a shared tile (owner 0), or in one of row owner − 1.
  __device__ __forceinline__ Span span(int r, int owner) const {
    if (owner == 0) return {view[r].first, shared_last[r]};
    if (owner != r + 1) return {0, -1};
    return {view[r].first, view[r].last};
  }

  // Return the positions that are visible to any row.
  __device__ __forceinline__ Span any_span(int owner) const {
    if (owner == 0) return {first, shared_end};
    return Config::kRows > 1 && owner == 2 ? span(Config::kRows - 1, 2) : span(0, 1);
  }

  // Return the view slot of a position.
  __device__ __forceinline__ int slot_of(int position, int owner) const {
    const bool second = Config::kRows > 1 && owner == 2;
    const bool lineage = Config::kRows == 1 ? view[0].last >= 0 : owner > 0;
    if (!lineage || position < tree_start) return position;
    const int* ancestors = second ? bits[Config::kRows - 1] : bits[0];
    return tree_start + set_bit<Config::kWords>(ancestors, position - tree_start);
  }
};
