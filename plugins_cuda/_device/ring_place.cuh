// Where a producer or a consumer stands in a ring of STAGES stages.
#pragma once

#include "types.cuh"

// A place in the ring, and the parity of the barriers that stand there.
struct RingPlace {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == STAGES) {
      slot = 0;
      parity ^= 1;
    }
  }
};
