// Activations of the experts' rows in shared memory, for the B operand: all rows of a launch if
// they fit, else those of one routed item after the other.
#pragma once

#include "../../_device/ptx.cuh"
#include "../../_device/types.cuh"
#include "expert_routing.cuh"

// The stride of rows of ``columns`` bf16, in bytes. 64 bytes of padding allow reads of two adjacent
// rows without bank conflicts.
template <int columns>
constexpr int kActivationRowBytes = round_up(2 * columns, 128) + 64;

// The complete CTA copies ``count`` rows to ``shared``, row i from ``source(i)``. The caller adds
// cp_async_wait<0>() and a __syncthreads().
template <int columns, class Source>
__device__ __forceinline__ void copy_rows(unsigned char* shared, int count, Source&& source) {
  constexpr int kPieces = columns / 8;
  for (int i = threadIdx.x; i < count * kPieces; i += blockDim.x) {
    const int row = i / kPieces, piece = i % kPieces;
    cp_async_16(shared + row * kActivationRowBytes<columns> + 16 * piece, source(row) + 8 * piece);
  }
  cp_async_commit();
}

// Run the units ``first`` … ``end`` − 1 of a CTA; an item has ``tiles`` units. Warp w calls
// ``run(unit, place of entry 0)`` for first + w, first + w + warps, …; with ``slices`` above 1, so
// many adjacent warps run the same units. With kRowsResident all rows are in shared memory.
// Otherwise ``gather(entry, count)`` copies those of as many of the next items as kPlaces hold,
// before their units run. Items that a CTA shares with others are short.
//
// C: kRowsResident, kWarps, kPlaces.
template <class C, int tiles, int slices = 1, class Gather, class Run>
__device__ __forceinline__ void run_units(const RoutedItem* items, int first, int end,
                                          Gather&& gather, Run&& run) {
  constexpr int kStride = C::kWarps / slices;
  int unit = first + static_cast<int>(threadIdx.x) / (32 * slices);
  if constexpr (C::kRowsResident) {
    for (; unit < end; unit += kStride) run(unit, 0);
  } else {
    for (int item = first / tiles; item * tiles < end;) {
      const int entry = items[item].first_entry;
      int count = 0;
      do {
        count += items[item++].entries;
      } while (item * tiles < end && count + items[item].entries <= C::kPlaces);
      // All warps have read the rows of the earlier items.
      __syncthreads();
      gather(entry, count);
      cp_async_wait<0>();
      __syncthreads();
      const int stop = end < item * tiles ? end : item * tiles;
      for (; unit < stop; unit += kStride) run(unit, -entry);
    }
  }
}
