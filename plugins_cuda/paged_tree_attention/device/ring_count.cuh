// Where a producer or a consumer stands in a ring (ring_place.cuh), in one register.
//
// STAGES is a power of two.
#pragma once

#include "../../_device/types.cuh"
#include "config.cuh"

static_assert((Config::kStages & (Config::kStages - 1)) == 0, "counts run over");

struct RingCount {
  unsigned passed;  // stages that it has passed by

  __device__ __forceinline__ int slot() const {
    return passed % Config::kStages;
  }
  // Of the barriers that stand there.
  __device__ __forceinline__ uint32_t parity() const {
    return passed / Config::kStages % 2;
  }
};
