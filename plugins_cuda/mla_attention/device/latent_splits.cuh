// The splits of a row's context, ranges of contiguous tiles, and their distribution over CTAs.
//
// Config: the members of latent_rows.cuh with ROWS 1, BATCH, SHORT_CONTEXT, SHORT_SPLIT,
// LONG_SPLIT, MAX_SPLITS, PLACES.
//
// The length of a row's splits depends only on the tiles that the row attends to. Sums are
// accumulated by tiles within a split, and then by splits, so that the bits of a row do not depend
// on other rows.
//
// The items of a launch are the splits of its rows, ordered by sequence, then by split, then by
// row, so that CTAs that run at the same time read the same tiles. CTAs take items in turn, which
// balances contexts of different lengths.
#pragma once

#include "../../_device/ptx_attention.cuh"
#include "config.cuh"
#include "latent_rows.cuh"

static_assert(Config::kRows == 1, "an item is a split of one row");

// The tiles that a row attends to.
struct Extent {
  int first, tiles;

  __device__ __forceinline__ explicit Extent(const RowView& view)
      : first(view.first / kTile), tiles(view.end() / kTile - view.first / kTile + 1) {}

  __device__ __forceinline__ int split_tiles() const {
    return tiles <= Config::kShortContext
               ? Config::kShortSplit
               : max(Config::kLongSplit, ceil_div(tiles, Config::kMaxSplits));
  }
  // A constant if the context is one split, so that the row's view is not required.
  __device__ __forceinline__ int splits() const {
    if constexpr (Config::kPlaces == 1) return 1;
    return ceil_div(tiles, split_tiles());
  }
};

// Count the items before each sequence, with ``threads`` threads: ``starts`` [BATCH + 1] in shared
// memory.
__device__ __forceinline__ void count_items(const RowInputs& in, int* starts, int threads) {
  const int lane = threadIdx.x % 32, warps = threads / 32;
  for (int sequence = threadIdx.x / 32; sequence < Config::kBatch; sequence += warps) {
    const int begin = in.row_start[sequence], stop = in.row_start[sequence + 1];
    int max_splits = 0;
    for (int row = begin + lane; row < stop; row += 32) {
      max_splits = max(max_splits, Extent(in.view(sequence, row)).splits());
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      max_splits = max(max_splits, __shfl_xor_sync(kAllLanes, max_splits, step));
    }
    if (lane == 0) starts[sequence + 1] = max_splits * (stop - begin);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int total = 0;
    starts[0] = 0;
    for (int sequence = 1; sequence <= Config::kBatch; ++sequence) {
      total += starts[sequence];
      starts[sequence] = total;
    }
  }
  __syncthreads();
}

// One CTA writes the number of splits of each row; ``thread`` is one of ``threads``.
__device__ __forceinline__ void leave_counts(const RowInputs& in, int thread, int threads,
                                             int* split_counts) {
  if (blockIdx.x + blockIdx.y > 0) return;
  for (int sequence = 0; sequence < Config::kBatch; ++sequence) {
    const int stop = in.row_start[sequence + 1];
    for (int row = in.row_start[sequence] + thread; row < stop; row += threads) {
      split_counts[row] = Extent(in.view(sequence, row)).splits();
    }
  }
}

// The items of a CTA, in order.
struct Items {
  const RowInputs* in;
  const int* starts;
  int next_item, sequence;

  LatentRows rows;
  int row, split;
  int tile, end;  // of the split

  __device__ __forceinline__ Items(const RowInputs& inputs, const int* item_starts)
      : in(&inputs), starts(item_starts), next_item(blockIdx.x), sequence(0) {}

  // Advance to the next item with tiles; return false if there is none.
  __device__ __forceinline__ bool advance() {
    while (next_item < starts[Config::kBatch]) {
      while (next_item >= starts[sequence + 1]) ++sequence;
      const int begin = in->row_start[sequence], count = in->row_start[sequence + 1] - begin;
      const int at = next_item - starts[sequence];
      next_item += static_cast<int>(gridDim.x);
      row = begin + at % count;
      split = at / count;
      rows.open(row, 1, *in, in->tree_start[sequence]);
      const Extent extent(rows.view[0]);
      const int length = extent.split_tiles();
      tile = extent.first + split * length;
      end = min(tile + length, extent.first + extent.tiles);
      if (tile < end) return true;
    }
    return false;
  }
};
