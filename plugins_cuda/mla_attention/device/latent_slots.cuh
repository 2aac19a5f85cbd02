// Slots of contiguous tiles that a row's context is cut into, and which of them a CTA takes.
//
// Config: those of latent_rows.cuh with ROWS 1, BATCH, SHORT_CONTEXT, SHORT_SLOT,
// LONG_SLOT, MOST_SLOTS, PLACES.
//
// How long a row's slots are depends on the tiles that the row sees and on nothing else: sums go
// tile by tile within a slot, and then slot by slot, so that a row's bits are its own. Items of a
// launch are the slots of its rows: sequence by sequence, slot by slot, row by row, so that CTAs
// that run side by side read the same tiles. CTAs take them in turn, which evens out contexts of
// different lengths.
#pragma once

#include "../../_device/ptx_attention.cuh"
#include "config.cuh"
#include "latent_rows.cuh"

static_assert(Config::kRows == 1, "an item is a slot of one row");

// The tiles that a row sees.
struct Extent {
  int first, tiles;

  __device__ __forceinline__ explicit Extent(const RowView& view)
      : first(view.first / kTile), tiles(view.end() / kTile - view.first / kTile + 1) {}

  __device__ __forceinline__ int slot_tiles() const {
    return tiles <= Config::kShortContext
               ? Config::kShortSlot
               : max(Config::kLongSlot, ceil_div(tiles, Config::kMostSlots));
  }
  // A constant where all of a context is one slot, so that nobody looks up what a row sees.
  __device__ __forceinline__ int slots() const {
    if constexpr (Config::kPlaces == 1) return 1;
    return ceil_div(tiles, slot_tiles());
  }
};

// Counts the items in front of each sequence, with ``threads`` threads: ``starts`` [BATCH + 1], in
// shared memory.
__device__ __forceinline__ void count_items(const RowInputs& in, int* starts, int threads) {
  const int lane = threadIdx.x % 32, warps = threads / 32;
  for (int sequence = threadIdx.x / 32; sequence < Config::kBatch; sequence += warps) {
    const int begin = in.row_start[sequence], stop = in.row_start[sequence + 1];
    int most = 0;
    for (int row = begin + lane; row < stop; row += 32) {
      most = max(most, Extent(in.view(sequence, row)).slots());
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      most = max(most, __shfl_xor_sync(kAllLanes, most, step));
    }
    if (lane == 0) starts[sequence + 1] = most * (stop - begin);
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

// One CTA leaves how many slots each row has, by ``thread`` of so many.
__device__ __forceinline__ void leave_counts(const RowInputs& in, int thread, int threads,
                                             int* slot_counts) {
  if (blockIdx.x + blockIdx.y > 0) return;
  for (int sequence = 0; sequence < Config::kBatch; ++sequence) {
    const int stop = in.row_start[sequence + 1];
    for (int row = in.row_start[sequence] + thread; row < stop; row += threads) {
      slot_counts[row] = Extent(in.view(sequence, row)).slots();
    }
  }
}

// A CTA's items, one after another.
struct Items {
  const RowInputs* in;
  const int* starts;
  int next_item, sequence;

  LatentRows rows;
  int row, slot;
  int tile, end;  // of the slot

  __device__ __forceinline__ Items(const RowInputs& inputs, const int* item_starts)
      : in(&inputs), starts(item_starts), next_item(blockIdx.x), sequence(0) {}

  // Goes to the next item that has tiles; false where there is none.
  __device__ __forceinline__ bool advance() {
    while (next_item < starts[Config::kBatch]) {
      while (next_item >= starts[sequence + 1]) ++sequence;
      const int begin = in->row_start[sequence], count = in->row_start[sequence + 1] - begin;
      const int at = next_item - starts[sequence];
      next_item += static_cast<int>(gridDim.x);
      row = begin + at % count;
      slot = at / count;
      rows.open(row, 1, *in, in->tree_start[sequence]);
      const Extent extent(rows.view[0]);
      const int length = extent.slot_tiles();
      tile = extent.first + slot * length;
      end = min(tile + length, extent.first + extent.tiles);
      if (tile < end) return true;
    }
    return false;
  }
};
