// A ring of stages in shared memory, and where a producer or a consumer stands in it.
#pragma once

#include "ptx.cuh"

template <int stages>
struct Ring {
  Mbarrier full[stages];
  Mbarrier empty[stages];
};

// A place in the ring, and the parity of the barriers that stand there.
template <int stages>
struct RingPlace {
  int slot = 0;
  uint32_t parity = 0;

  // ``stages`` is a multiple of `by`, or this one of several that take turns by as much.
  __device__ __forceinline__ void advance(int by = 1) {
    slot += by;
    if (slot >= stages) {
      slot -= stages;
      parity ^= 1;
    }
  }
};
