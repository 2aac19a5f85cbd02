// What the rows of a row tile see, and the order in which their sums take it: that of
// attention_walk.cuh.
//
// Config: SPLIT, WORDS, WINDOW.
//
// Tiles of 32 positions, four to a chunk; chunks go to slot `chunk mod SPLIT`, the tiles of a chunk
// to the slot's four chains. Tiles of committed keys are shared by all of these rows. A row with
// ancestors in the tree has tiles of its own from tree_start's on, whose keys stand where they will
// once they are committed.
#pragma once

#include "../../_device/attention_rows.cuh"
#include "config.cuh"

constexpr int kTile = 32, kChains = 4, kChunk = kChains * kTile;
static_assert((Config::kSplit & (Config::kSplit - 1)) == 0, "slots are found by masks");
static_assert(Config::kWindow == 0, "rows see everything before them");

// Positions first … last.
struct Span {
  int first, last;
};

struct ManyRow {
  int index;   // in the launch
  int shared;  // the last position that it sees in tiles that all rows share
  int last;    // the last one in the tree, −1 where it has no tiles of its own
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
  int shared_end;  // the last position of the tiles that all share
  int end;         // the last position that some row sees

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

  // What a row sees of a tile: of one of `own`'s that row alone does.
  __device__ __forceinline__ Span seen(int row, int own) const {
    if (own < 0) return {0, rows[row].shared};
    return row == own ? Span{tree_start & -kTile, rows[row].last} : Span{0, -1};
  }
};

// The tiles of a chain: shared ones, then those of each row alone.
struct Tiles {
  const ManyRows& rows;
  int chain;     // by its first position
  int from = 0;  // the first position
  int own = -2;  // whose tile it is, −1: everyone's
  int left = 0;  // tiles behind this one with the same owner

  __device__ __forceinline__ Tiles(const ManyRows& all, int slot, int number)
      : rows(all), chain(slot * kChunk + number * kTile) {}

  // To the next tile; false behind the last.
  __device__ __forceinline__ bool advance() {
    from += kStride;
    return --left >= 0 || next_owner();
  }

  // To the slot's chain that is `by` further; false where it has none.
  __device__ __forceinline__ bool next_chain(int by) {
    own = -2;
    left = 0;
    chain += by * kTile;
    return of_slot() >= by;
  }

  // Which of its slot's chains this is.
  __device__ __forceinline__ int of_slot() const {
    return chain / kTile % kChains;
  }

  // The last position that someone sees of these tiles.
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
