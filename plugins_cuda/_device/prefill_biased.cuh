// A dense GEMM of a prompt's rows whose outputs have a bias.
//
// Constants of the kernel: those of prefill_dense.cuh, HAS_BIAS.
#pragma once

#include "prefill_dense.cuh"
#include "prefill_store.cuh"

struct BiasedGemm : DenseGemm {
  static constexpr int kStagingValues = kRowsStride;
  const uint16_t* bias;

  __device__ __forceinline__ LaneBias ahead_of(const GemmTile& tile) const {
#if HAS_BIAS
    return lane_bias(bias, tile);
#else
    return {0, 0};
#endif
  }
};
