// A ring of STAGES stages in shared memory, and where a producer or a consumer stands in it.
#pragma once

#include "ptx.cuh"

struct Ring {
  Mbarrier full[STAGES];
  Mbarrier empty[STAGES];
};

// A place in the ring, and the parity of the barriers that stand there.
struct RingPlace {
  int slot = 0;
  uint32_t parity = 0;

  // STAGES is a multiple of `by`, or this one of several that take turns by as much.
  __device__ __forceinline__ void advance(int by = 1) {
    slot += by;
    if (slot >= STAGES) {
      slot -= STAGES;
      parity ^= 1;
    }
  }
};
