// Which rows a CTA takes together, where each has up to so many of a sequence.
#pragma once

#include "types.cuh"

// Rows first … first + count − 1 of the launch, of one sequence.
struct RowTile {
  int sequence, first, count;
};

// Tile `tile` of up to `most` rows, counting through `batch` sequences; count 0 where there is
// none.
template <int batch, int most>
__device__ __forceinline__ RowTile row_tile(const int* row_start, int tile) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int base = 0; base < batch; base += 32) {
    const int sequence = base + lane;
    const int begin = sequence < batch ? row_start[sequence] : 0;
    const int rows = sequence < batch ? row_start[sequence + 1] - begin : 0;
    const int tiles = ceil_div(rows, most);
    int before = tiles;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kAllLanes, before, step);
      if (lane >= step) before += other;
    }
    before -= tiles;
    const bool mine = tile >= before && tile < before + tiles;
    const uint32_t found = __ballot_sync(kAllLanes, mine);
    if (found != 0u) {
      const int owner = __ffs(static_cast<int>(found)) - 1;
      const int offset = (tile - __shfl_sync(kAllLanes, before, owner)) * most;
      return {base + owner, __shfl_sync(kAllLanes, begin, owner) + offset,
              min(most, __shfl_sync(kAllLanes, rows, owner) - offset)};
    }
    tile -= __shfl_sync(kAllLanes, before + tiles, 31);
  }
  return {0, 0, 0};
}
