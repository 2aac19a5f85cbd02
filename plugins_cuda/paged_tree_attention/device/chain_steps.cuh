// The visible keys of the rows of a row tile, in the order of their sums, which is that of
// attention_walk.cuh.
//
// Config: SPLIT, WORDS, WINDOW.
//
// Tiles have 32 positions, chunks four tiles. A chunk belongs to split `chunk mod SPLIT` (a slot in
// names); its tiles belong to the split's four tile runs (chains). The rows share tiles of
// committed keys. From tree_start's tile on, a row with ancestors in the tree has separate tiles,
// whose keys are at the positions that they will have after the commit.
#pragma once

#include "../../_device/attention_rows.cuh"
#include "config.cuh"

constexpr int kTile = 32, kChains = 4, kChunk = kChains * kTile;
static_assert((Config::kSplit & (Config::kSplit - 1)) == 0, "splits are computed with masks");
static_assert(Config::kWindow == 0, "rows have no window");

// Positions first … last.
struct Span {
  int first, last;
};

struct ManyRow {
  int index;   // in the launch
  int shared;  // the last visible position in shared tiles
  int last;    // the last one in the tree, or −1 without separate tiles
};

__device__ __forceinline__ ManyRow open_many_row(int index, const int* row_slot, int tree_start,
                                                 const int* ancestor_bits) {
  const int* ancestors = ancestor_bits + index * Config::kWords;
  const RowView view =
      view_of<Config::kWords, Config::kWindow>(row_slot[index], tree_start, ancestors);
  return {index, view.last >= 0 ? (tree_start & -kTile) - 1 : view.end(), view.last};
}

// The rows of a row tile.
struct ManyRows {
  const ManyRow* rows;
  int count, tree_start;
  int table;       // the first entry of the page table of this sequence and KV head
  int shared_end;  // the last position of the shared tiles
  int end;         // the last position that is visible to any row

  ManyRows() = default;

  __device__ __forceinline__ ManyRows(const ManyRow* all, int rows_here, int start, int entry)
      : rows(all), count(rows_here), tree_start(start), table(entry), shared_end(-1), end(-1) {
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      shared_end = max(shared_end, rows[i].shared);
      end = max(end, max(rows[i].shared, rows[i].last));
    }
  }

  __device__ __forceinline__ int chunks() const {
    return end / kChunk + 1;
  }

  // Return the visible positions of a row in a tile of `own`: in a separate one, only for that row.
  __device__ __forceinline__ Span seen(int row, int own) const {
    if (own < 0) return {0, rows[row].shared};
    return row == own ? Span{tree_start & -kTile, rows[row].last} : Span{0, -1};
  }
};

// The tiles of a tile run: shared ones, then those of each row.
struct Tiles {
  const ManyRows& rows;
  int chain;     // the first position of the tile run
  int from = 0;  // the first position
  int own = -2;  // the row that owns the tile, −1: shared
  int left = 0;  // further tiles with the same owner

  __device__ __forceinline__ Tiles(const ManyRows& all, int slot, int number)
      : rows(all), chain(slot * kChunk + number * kTile) {}

  // Advance to the next tile; return false after the last.
  __device__ __forceinline__ bool advance() {
    from += kStride;
    return --left >= 0 || next_owner();
  }

  // Advance to the split's tile run `by` further; return false if there is none.
  __device__ __forceinline__ bool next_chain(int by) {
    own = -2;
    left = 0;
    chain += by * kTile;
    return of_slot() >= by;
  }

  // Return the index of this tile run in its split.
  __device__ __forceinline__ int of_slot() const {
    return chain / kTile % kChains;
  }

  // Return the last position of these tiles that is visible to any row.
  __device__ __forceinline__ int end() const {
    return own < 0 ? rows.shared_end : rows.rows[own].last;
  }

 private:
  static constexpr int kStride = Config::kSplit * kChunk;

  __device__ __forceinline__ bool next_owner() {
    while (++own < rows.count) {
      const int first = own < 0 ? 0 : rows.tree_start & -kChunk;
      from = chain + ((first - (chain & -kChunk) + kStride - 1) & -kStride);
      if (from > end()) continue;
      left = (end() - from) / kStride;
      return true;
    }
    return false;
  }
};
