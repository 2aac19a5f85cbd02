// Activations of the experts' rows in shared memory, for the B operand: all rows of a launch where
// they fit, else those of one routed item after the other.
#pragma once

#include "../../_device/ptx.cuh"
#include "../../_device/types.cuh"
#include "expert_routing.cuh"

// Bytes from one row of ``columns`` bf16 to the next: 64 of padding let two neighbouring rows be
// read at once without bank conflicts.
template <int columns>
constexpr int kActivationRowBytes = round_up(2 * columns, 128) + 64;

// The whole CTA copies ``count`` rows, row i from ``source(i)``, into ``shared``.
// cp_async_wait<0>() and a __syncthreads() follow.
template <int columns, class Source>
__device__ __forceinline__ void copy_rows(unsigned char* shared, int count, Source&& source) {
  constexpr int kPieces = columns / 8;
  for (int i = threadIdx.x; i < count * kPieces; i += blockDim.x) {
    const int row = i / kPieces, piece = i % kPieces;
    cp_async_16(shared + row * kActivationRowBytes<columns> + 16 * piece, source(row) + 8 * piece);
  }
  cp_async_commit();
}

// The units ``first`` … ``end`` − 1 of a CTA, which are items of ``tiles`` units each: warp w runs
// first + w, first + w + warps, … by ``run(unit, place of entry 0)``; with ``slices`` above 1 so
// many neighbouring warps run the same units. Where kRowsResident all rows are there. Else
// ``gather(entry, count)`` copies those of as many of the next items as kPlaces hold, before their
// units run: items that a CTA shares with others are short.
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
      // The rows of the items before are no longer read.
      __syncthreads();
      gather(entry, count);
      cp_async_wait<0>();
      __syncthreads();
      const int stop = end < item * tiles ? end : item * tiles;
      for (; unit < stop; unit += kStride) run(unit, -entry);
    }
  }
}
