// Prefill GEMMs whose first packed rows are query heads. Tile j of a head holds rows 8j … 8j+7 and
// D/2+8j … D/2+8j+7, the pairs that RoPE rotates.
//
// C: the members that prefill_biased.cuh needs, kQHeads and kHeadDim.
#pragma once

#include "angles.cuh"
#include "prefill_biased.cuh"

template <class C>
struct HeadsGemm : BiasedGemm<C> {
  static constexpr int kHeadTiles = C::kHeadDim / 16;
  const float* cos;
  const float* sin;
  const int* positions;
  const int* write_slot;
  uint16_t* q;

  // The angles of a token, and its cache slot.
  struct Place : Angles {
    int slot;
  };

  // Return the place of a row's outputs in packed tile ``packed``.
  __device__ __forceinline__ Place place_of(int row, int packed) const {
    Place at;
    at.slot = packed / kHeadTiles < C::kQHeads ? 0 : write_slot[row];
    const size_t angles =
        static_cast<size_t>(positions[row]) * (C::kHeadDim / 2) + 8 * (packed % kHeadTiles);
    at.load(cos + angles, sin + angles);
    return at;
  }
};
