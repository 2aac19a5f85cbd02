// The position of a producer or consumer in a ring (ring_place.cuh), in one register.
//
// STAGES is a power of two.
#pragma once

#include "../../_device/types.cuh"
#include "config.cuh"

static_assert((Config::kStages & (Config::kStages - 1)) == 0, "counts wrap around");

struct RingCount {
  unsigned passed;  // number of stages passed

  __device__ __forceinline__ int slot() const {
    return passed % Config::kStages;
  }
  // The parity of the stage's barriers.
  __device__ __forceinline__ uint32_t parity() const {
    return passed / Config::kStages % 2;
  }
};
