// Helpers of the ops that lay out the rows of a step: pool slots, live sequences, row copies.
#pragma once

#include "ptx.cuh"

// The pool slot of a view slot of sequence ``b``, by ``page_table`` [B, pages]. A row that is not
// live, or whose slot is past the table, gets a slot of page 0 that depends on the row. The
// constructor starts to load the page; place() waits for it.
struct PoolSlot {
  int page = 0, page_size, offset;

  __device__ __forceinline__ PoolSlot(const int* page_table, int pages, int tokens_of_page, int b,
                                      int slot, int row, bool live)
      : page_size(tokens_of_page) {
    const int index = slot / page_size;
    const bool paged = live && page_table != nullptr && index < pages;
    if (paged) page = load_l2_int(page_table + static_cast<int64_t>(b) * pages + index);
    offset = paged ? slot - index * page_size : row % page_size;
  }

  __device__ __forceinline__ int place() const {
    return page * page_size + offset;
  }
};

// Return one past the last sequence that is not done, to every lane of a warp. Each warp that needs
// it calls this.
__device__ inline int live_sequences(const int* done, int batch) {
  constexpr int kAtOnce = 2;
  const int lane = threadIdx.x % 32;
  int live = 0;
#pragma unroll 1
  for (int first = 0; first < batch; first += 32 * kAtOnce) {
    int are_done[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      are_done[n] = load_l2_int(done + min(first + 32 * n + lane, batch - 1));
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int base = first + 32 * n;
      const unsigned lives = __ballot_sync(kAllLanes, base + lane < batch && are_done[n] == 0);
      if (lives) live = base + 32 - __clz(static_cast<int>(lives));
    }
  }
  return live;
}

// Write row_start [batch + 1] with ``rows`` rows for each sequence up to the last that is not done.
// One warp calls it.
__device__ inline void write_even_row_start(int* row_start, const int* done, int batch, int rows) {
  const int live = live_sequences(done, batch);
#pragma unroll 1
  for (int b = threadIdx.x % 32; b <= batch; b += 32) row_start[b] = min(b, live) * rows;
}

// A subset of a block's threads, with the index of this one.
struct Threads {
  int own, count;
};

// Copy a row of bf16, ``vectors`` times 16 bytes, with these threads; write zeros without a source.
// A thread issues several loads before the first store, because the compiler must assume that a
// store aliases the next load.
__device__ inline void copy_row(uint4* to, const uint4* from, int vectors, const Threads& threads) {
  constexpr int kAtOnce = 8;
#pragma unroll 1
  for (int first = threads.own; first < vectors; first += kAtOnce * threads.count) {
    uint4 held[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int i = first + n * threads.count;
      held[n] = make_uint4(0, 0, 0, 0);
      if (from != nullptr && i < vectors) held[n] = from[i];
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int i = first + n * threads.count;
      if (i < vectors) to[i] = held[n];
    }
  }
}

// Copy with all threads of a block.
__device__ inline void copy_row(uint4* to, const uint4* from, int vectors) {
  const Threads all{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)};
  copy_row(to, from, vectors, all);
}
