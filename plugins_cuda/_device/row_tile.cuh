// Tiles of rows for CTAs, each with up to a maximum of rows of one sequence.
#pragma once

#include "types.cuh"

// Rows first … first + count − 1 of the launch, of one sequence.
struct RowTile {
  int sequence, first, count;
};

// Return tile ``tile`` of up to ``max_rows`` rows, in the order of ``batch`` sequences. Its count
// is 0 if there is no such tile.
template <int batch, int max_rows>
__device__ __forceinline__ RowTile row_tile(const int* row_start, int tile) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int base = 0; base < batch; base += 32) {
    const int sequence = base + lane;
    const int begin = sequence < batch ? row_start[sequence] : 0;
    const int rows = sequence < batch ? row_start[sequence + 1] - begin : 0;
    const int tiles = ceil_div(rows, max_rows);
    int before = tiles;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kAllLanes, before, step);
      if (lane >= step) before += other;
    }
    before -= tiles;
    const bool mine = tile >= before && tile < before + tiles;
    const uint32_t live_lanes = __ballot_sync(kAllLanes, mine);
    if (live_lanes != 0u) {
      const int owner = __ffs(static_cast<int>(live_lanes)) - 1;
      const int offset = (tile - __shfl_sync(kAllLanes, before, owner)) * max_rows;
      return {base + owner, __shfl_sync(kAllLanes, begin, owner) + offset,
              min(max_rows, __shfl_sync(kAllLanes, rows, owner) - offset)};
    }
    tile -= __shfl_sync(kAllLanes, before + tiles, 31);
  }
  return {0, 0, 0};
}
