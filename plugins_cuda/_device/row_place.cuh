// The place of a row in a batch of trees: its sequence, its slot there, and the row of slot 0.
#pragma once

#include "ptx.cuh"

// Without ``row_start`` [batch + 1] each sequence has ``nodes`` rows. With it, the rows after those
// of all sequences are padding and belong to sequence ``batch``.
struct RowPlace {
  int sequence, slot, first, rows;

  // All lanes of a warp must call this: each lane reads the row ends of some sequences.
  __device__ __forceinline__ RowPlace(const int* row_start, int row, int nodes, int batch)
      : sequence(row / nodes), slot(row % nodes), first(row - slot), rows(nodes) {
    if (row_start == nullptr) return;
    const int lane = threadIdx.x % 32;
    sequence = 0;
#pragma unroll 1
    for (int base = 0; base < batch; base += 32) {
      const int b = base + lane;
      const int end = load_l2_int(row_start + min(b, batch - 1) + 1);
      sequence += __popc(__ballot_sync(kAllLanes, b < batch && end <= row));
    }
    first = load_l2_int(row_start + sequence);
    rows = load_l2_int(row_start + min(sequence + 1, batch)) - first;
    slot = row - first;
  }
};
