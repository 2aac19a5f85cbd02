// What the ops that lay out a step's rows share: pool slots, live sequences, row copies.
#pragma once

#include "ptx.cuh"

// Where a view slot of a sequence lies in the pool; ``page_table`` [pages] is the sequence's own.
// What is not live, or lies past the table, goes to page 0, at a place that follows from the row.
__device__ __forceinline__ int pool_slot(const int* page_table, int pages, int page_size, int slot,
                                         int row, bool live) {
  const int page = slot / page_size;
  if (!live || page >= pages) return row % page_size;
  return page_table[page] * page_size + slot % page_size;
}

// One past the last sequence that is not done. All threads of the block call it.
__device__ inline int live_sequences(const int* done, int batch) {
  __shared__ int live;
  if (threadIdx.x == 0) live = 0;
  __syncthreads();
  for (int b = threadIdx.x; b < batch; b += blockDim.x) {
    if (done[b] == 0) atomicMax(&live, b + 1);
  }
  __syncthreads();
  return live;
}

// row_start [batch + 1] where each of the first ``live`` sequences has ``rows`` rows.
__device__ inline void write_even_row_start(int* row_start, int batch, int live, int rows) {
  for (int b = threadIdx.x; b <= batch; b += blockDim.x) row_start[b] = min(b, live) * rows;
}

// A row of bf16, ``vectors`` times 16 bytes, by all threads of a block; zeros without a source.
__device__ inline void copy_row(uint4* to, const uint4* from, int vectors) {
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
    to[i] = from == nullptr ? make_uint4(0, 0, 0, 0) : from[i];
  }
}
