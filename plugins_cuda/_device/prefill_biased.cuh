// A dense prefill GEMM whose outputs have a bias.
//
// C: the members that prefill_dense.cuh needs, and kHasBias.
#pragma once

#include "prefill_dense.cuh"
#include "prefill_store.cuh"

template <class C>
struct BiasedGemm : DenseGemm<C> {
  static constexpr int kStagingValues = kRowsStride;
  const uint16_t* bias;

  __device__ __forceinline__ LaneBias ahead_of(const GemmTile& tile) const {
    if constexpr (C::kHasBias != 0) {
      return lane_bias<C::kRowTiles>(bias, tile);
    } else {
      return {0, 0};
    }
  }
};
