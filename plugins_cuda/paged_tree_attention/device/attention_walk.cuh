// The walk of a team of warps over tiles of keys in the decode kernels, and the copies of the
// tiles.
//
// Config: KV_HEADS, SHARE, GROUP, WIDTH, CODES, PAGE_SIZE, TABLE, WORDS, WINDOW, SPLIT, ROWS (per
// warp), ROW_WARPS (of a team), ROW_CTAS, SPLIT_TEAMS; for the kernels that include it also
// SHARED_BYTES (the launch's shared memory).
//
// Tile c has positions 32c … 32c + 31. A chunk of four tiles belongs to split `chunk mod SPLIT` (a
// slot in names); its tiles belong to the four tile runs (chains) of the split. With SPLIT_TEAMS 0
// the CTA has four teams, and each processes one tile run of every split. Otherwise it has
// SPLIT_TEAMS teams, and each processes all tile runs of separate splits.
//
// Tiles of committed keys are copied once for all rows of the CTA. From tree_start's tile on, a row
// with ancestors in the tree has separate tiles, whose keys are at the positions that they will
// have after the commit. A CTA with one row copies these tiles directly. Several rows share a copy
// of the tree's slots (`tail`) and select their keys from it.
#pragma once

#include "../../_device/attention_rows.cuh"
#include "../../_device/ptx_routing.cuh"
#include "cache_tile.cuh"
#include "config.cuh"
#include "mma_rows.cuh"
#include "pool_row.cuh"

constexpr int kTile = 32;
constexpr int kChains = 4;  // of a split
constexpr int kChunk = kTile * kChains;
constexpr int kPeriod = Config::kSplit * kChains;  // distance between the tiles of a tile run
constexpr int kTeams = Config::kSplitTeams > 0 ? Config::kSplitTeams : kChains;
constexpr int kTeamChains = Config::kSplitTeams > 0 ? kChains : 1;  // of a split, of one team
constexpr int kRows = Config::kRows * Config::kRowWarps;
using Mma = MmaRows<Config::kGroup, Config::kRows>;
constexpr int kPairs = ceil_div(Config::kRows, Mma::kAll);  // m16 tiles of a warp
// Loops are not unrolled if registers would spill.
constexpr bool kIsCrowded = kPairs > (Config::kSplitTeams > 0 ? 1 : 2);
constexpr int kCopiesAtOnce = kIsCrowded                                       ? 1
                              : Config::kSplitTeams > 0 && Config::kWidth > 64 ? 4
                                                                               : 32;
constexpr int kRowLanes = 16;
constexpr int kThreads = 32 * kTeams * Config::kRowWarps;
constexpr int kTileUnits = kTile * kRowUnits;
constexpr bool kHasTail = kRows > 1;
constexpr int kTailSlots = kTile * (1 + Config::kWords);
// The maximum of pages of the tail, which starts at the first slot of a tile.
constexpr int kTailPages =
    ceil_div(kTailSlots, Config::kPageSize) + (kTile % Config::kPageSize == 0 ? 0 : 1);
static_assert((Config::kSplit & (Config::kSplit - 1)) == 0, "splits are computed with masks");
static_assert(kRows <= kRowLanes, "every 16 lanes hold the views of all rows");
static_assert(kTile == 32 && kChunk == 128, "shifts by 5 and 7");

// The minimum and the maximum of all rows' values, in every lane.
__device__ __forceinline__ int rows_minimum(int value) {
  return kRows > 1 ? warp_min(value) : value;
}

__device__ __forceinline__ int rows_maximum(int value) {
  return kRows > 1 ? warp_max_int(value) : value;
}

// Positions first … last.
struct Span {
  int first, last;
};

// The rows of a CTA. Lane i has the data of row i mod 16; rows past the last repeat it.
struct Rows {
  int index = -1;  // this lane's row of the launch
  int slot;
  int words[Config::kWords];
  RowView view;
  int shared_last;  // the last visible position in shared tiles
  int count;
  bool any_tree;              // some row has separate tiles in the tail
  int first, end;             // positions that are visible to any row
  int shared_end;             // the last shared one of them
  int full_first, full_last;  // shared positions that are visible to all rows
  int tail_end;               // the last position in the tail

  __device__ __forceinline__ void load(int row, const int* row_slot, const int* ancestor_bits) {
    index = row;
    slot = row_slot[row];
#pragma unroll
    for (int i = 0; i < Config::kWords; ++i) words[i] = ancestor_bits[row * Config::kWords + i];
  }

  __device__ __forceinline__ void open(int first_row, int row_count, const int* row_slot,
                                       int tree_start, const int* ancestor_bits) {
    count = row_count;
    const int row = first_row + min(static_cast<int>(threadIdx.x) % kRowLanes, count - 1);
    if (row != index) load(row, row_slot, ancestor_bits);
    __syncwarp();
    view = view_of<Config::kWords, Config::kWindow>(slot, tree_start, words);
    const bool in_tail = kHasTail && view.last >= 0;
    shared_last = in_tail ? (tree_start & -kTile) - 1 : view.end();
    first = Config::kWindow > 0 ? rows_minimum(view.first) : 0;
    end = rows_maximum(view.end());
    shared_end = rows_maximum(shared_last);
    tail_end = kHasTail ? rows_maximum(view.last) : -1;
    any_tree = tail_end >= 0;
    full_first = Config::kWindow > 0 ? rows_maximum(view.first) : 0;
    full_last = rows_minimum(shared_last);
  }

  // Return the visible positions of a row in shared tiles.
  __device__ __forceinline__ Span shared_span(int row) const {
    return {__shfl_sync(kAllLanes, view.first, row), __shfl_sync(kAllLanes, shared_last, row)};
  }

  // Return the visible positions of row `row` in a separate tile of row `own`: none if they differ.
  __device__ __forceinline__ Span own_span(int own, int row) const {
    const int from = __shfl_sync(kAllLanes, view.first, own);
    const int to = __shfl_sync(kAllLanes, view.last, own);
    return row == own ? Span{from, to} : Span{0, -1};
  }

  __device__ __forceinline__ int chunks() const {
    return (end >> 7) - (first >> 7) + 1;
  }

  // Whether any row has visible keys in a split. If the splits are distributed over `of` CTAs (a
  // power of two): the number of CTAs with such a split, the index of CTA `cta` among them, and
  // whether it has one.
  __device__ __forceinline__ bool occupy(int slot) const {
    return ((slot - (first >> 7)) & (Config::kSplit - 1)) < chunks();
  }

  __device__ __forceinline__ int ctas(int of) const {
    return min(of, chunks());
  }

  __device__ __forceinline__ int number_of(int cta, int of) const {
    return (cta - (first >> 7)) & (of - 1);
  }

  __device__ __forceinline__ bool occupy_cta(int cta, int of) const {
    return number_of(cta, of) < chunks();
  }

  // Whether a tile of the tail may be in a split of CTA `cta`.
  __device__ __forceinline__ bool tail_in_cta(int cta, int of) const {
    const int chunk = view.tree_start >> 7;
    return any_tree && ((cta - chunk) & (of - 1)) <= (tail_end >> 7) - chunk;
  }
};

struct Walk {
  const uint4* k_pool;
  const uint4* v_pool;
  const int* table;  // of this sequence and KV head
  int kv_head;
  int lane, pair_lane;  // in the warp, and in the team
  Rows rows;
  int entries;       // pool rows of 32 shared tiles of a team, one per lane
  int entries_from;  // the first of them
  int tail_page;     // page number `lane` of the tail

  __device__ __forceinline__ static int own_tile_from(int tile, int own) {
    return tile + ((own - tile) & (kPeriod - 1));
  }

  // Return the first tile of a split's tile run.
  __device__ __forceinline__ int first_tile(int slot, int chain) const {
    return own_tile_from(rows.first >> 5, slot * kChains + chain);
  }

  // The same if a row at ``slot`` is the CTA's first.
  __device__ __forceinline__ static int first_tile_of(int slot, int from_slot, int chain) {
    const int first = Config::kWindow > 0 ? max(slot - Config::kWindow + 1, 0) : 0;
    return own_tile_from(first >> 5, from_slot * kChains + chain);
  }

  __device__ __forceinline__ bool shares(int tile) const {
    return tile * kTile <= rows.shared_end;
  }

  __device__ __forceinline__ int pool_row(int slot) const {
    return pool_row_of<Config::kKvHeads, Config::kShare, Config::kPageSize>(
        table[slot / Config::kPageSize], kv_head, slot);
  }

  // The offset of tile number `i` of a team after one of its tiles, chunk by chunk.
  __device__ __forceinline__ static int tiles_ahead(int i) {
    return i / kTeamChains * kPeriod + i % kTeamChains;
  }

  // Look up the pool rows of the tiles from that of the same chunk as `tile` on.
  __device__ __forceinline__ void look_up(int tile) {
    entries_from = tile & -kTeamChains;
    const int slot = (entries_from + tiles_ahead(lane)) * kTile;
    entries = slot < Config::kTable * Config::kPageSize ? pool_row(slot) : 0;
  }

  // Return the pool row of this lane's key of a shared tile, or -1 if it is invisible.
  __device__ __forceinline__ int entry_of(int position) const {
    if (position < rows.first || position > rows.shared_end) return -1;
    if (kHasTail || rows.view.last < 0 || position < rows.view.tree_start) {
      return pool_row(position);
    }
    const int start = rows.view.tree_start;
    return pool_row(start + set_bit<Config::kWords>(rows.words, position - start));
  }

  // Start to copy a tile to `keys`, with its values after them. Invisible keys become zeros,
  // because a weight of 0 does not cancel NaN.
  __device__ __forceinline__ void fetch(int tile, uint4* keys) {
    constexpr int kSpan = 32 * Config::kRowWarps, kAll = kTile * kUnits;
    constexpr int kCopies = ceil_div(kAll, kSpan);
    const int from = tile * kTile, to = from + kTile - 1;
    const bool lineage = !kHasTail && rows.view.last >= 0 && to >= rows.view.tree_start;
    if (Config::kPageSize % kTile == 0 && !lineage) {
      const int ahead = tile - entries_from;
      if (ahead < 0 || ahead >= 32 / kTeamChains * kPeriod ||
          (ahead & (kPeriod - 1)) >= kTeamChains) {
        look_up(tile);
      }
      const int after = tile - entries_from, chunk = after / kPeriod;
      const int from_lane = chunk * kTeamChains + (after & (kTeamChains - 1));
      const int entry = __shfl_sync(kAllLanes, entries, from_lane);
      const uint4* k = k_pool + static_cast<int64_t>(entry) * kUnits;
      const uint4* v = v_pool + static_cast<int64_t>(entry) * kUnits;
#pragma unroll(kCopiesAtOnce < kCopies ? kCopiesAtOnce : kCopies)
      for (int i = 0; i < kCopies; ++i) {
        const int unit = i * kSpan + pair_lane, key = unit / kUnits;
        if (kAll % kSpan != 0 && unit >= kAll) break;
        const bool seen = from + key >= rows.first && from + key <= rows.shared_end;
        const int place = tile_unit<kCacheWords>(key, unit % kUnits);
        cp_async_16_or_zero(keys + place, k + unit, seen);
        cp_async_16_or_zero(keys + kTileUnits + place, v + unit, seen);
      }
      return;
    }
    const int mine = entry_of(from + lane);
#pragma unroll 1
    for (int i = 0; i < kCopies; ++i) {
      const int unit = i * kSpan + pair_lane;
      const int key = unit / kUnits % kTile;
      const int source = __shfl_sync(kAllLanes, mine, key);
      if (unit >= kAll) continue;
      const int64_t place = static_cast<int64_t>(max(source, 0)) * kUnits + unit % kUnits;
      const int target = tile_unit<kCacheWords>(key, unit % kUnits);
      cp_async_16_or_zero(keys + target, k_pool + place, source >= 0);
      cp_async_16_or_zero(keys + kTileUnits + target, v_pool + place, source >= 0);
    }
  }

  // Open the CTA's rows; the pages of the tail are loaded at the same time.
  __device__ __forceinline__ void open(int first_row, int row_count, const int* row_slot,
                                       int tree_start, const int* ancestor_bits) {
    const int first_page = (tree_start & -kTile) / Config::kPageSize;
    if (kHasTail) tail_page = table[min(first_page + lane, Config::kTable - 1)];
    rows.open(first_row, row_count, row_slot, tree_start, ancestor_bits);
  }

  // Return the pool row of a slot of the tail, which starts at slot `base`; all lanes call it.
  __device__ __forceinline__ int tail_entry(int slot, int base) const {
    if (kTailPages > 32) return pool_row(min(slot, Config::kTable * Config::kPageSize - 1));
    const int page =
        __shfl_sync(kAllLanes, tail_page, slot / Config::kPageSize - base / Config::kPageSize);
    return pool_row_of<Config::kKvHeads, Config::kShare, Config::kPageSize>(page, kv_head, slot);
  }

  // Start to copy the tree's slots, from the tile in which it starts; values after keys.
  __device__ __forceinline__ void fetch_tail(uint4* tail) const {
    const int base = rows.view.tree_start & -kTile;
    const int units = min(rows_maximum(rows.slot) + 1 - base, kTailSlots) * kUnits;
    for (int unit = opaque(threadIdx.x); unit - lane < units; unit += kThreads) {
      const int row = unit / kUnits, entry = tail_entry(base + row, base);
      if (unit >= units) continue;
      const int64_t from = static_cast<int64_t>(entry) * kUnits + unit % kUnits;
      const int to = tile_unit<kCacheWords>(row, unit % kUnits);
      cp_async_16(tail + to, k_pool + from);
      cp_async_16(tail + kTailSlots * kRowUnits + to, v_pool + from);
    }
  }

  // Find the next separate tile of rows row … end − 1 in a split's tile run; starts with tile −1.
  __device__ __forceinline__ bool next_own_tile(int slot, int chain, int end, int& row,
                                                int& tile) const {
    if (tile >= 0) tile += kPeriod;
    for (; row < end; ++row, tile = -1) {
      const Span sees = rows.own_span(row, row);
      const int begin = max(rows.view.tree_start, sees.first) >> 5;
      if (tile < 0) tile = own_tile_from(begin, slot * kChains + chain);
      if (tile * kTile <= sees.last) return true;
    }
    return false;
  }

  // Return the tail's row for this lane's key of a separate tile. For invisible keys it is the
  // row's own key, so that all are finite.
  __device__ __forceinline__ int tail_row(int row, int tile) const {
    const int start = rows.view.tree_start, base = start & -kTile;
    const int first = __shfl_sync(kAllLanes, rows.view.first, row);
    const int last = __shfl_sync(kAllLanes, rows.view.last, row);
    const int own = __shfl_sync(kAllLanes, rows.slot, row);
    int ancestors[Config::kWords];
#pragma unroll
    for (int i = 0; i < Config::kWords; ++i)
      ancestors[i] = __shfl_sync(kAllLanes, rows.words[i], row);
    const int position = tile * kTile + lane;
    if (position < first || position > last) return own - base;
    if (position < start) return position - base;
    return start - base + set_bit<Config::kWords>(ancestors, position - start);
  }
};
