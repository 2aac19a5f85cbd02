// A ring of stages in shared memory, and the position of a producer or consumer in it.
#pragma once

#include "ptx.cuh"

template <int stages>
struct Ring {
  Mbarrier full[stages];
  Mbarrier empty[stages];
};

// A stage of the ring, and the parity of its barriers.
template <int stages>
struct RingPlace {
  int slot = 0;
  uint32_t parity = 0;

  // ``by`` divides ``stages``, unless the position always advances by the same number.
  __device__ __forceinline__ void advance(int by = 1) {
    slot += by;
    if (slot >= stages) {
      slot -= stages;
      parity ^= 1;
    }
  }
};
