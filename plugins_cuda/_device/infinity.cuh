// −∞, for which NVRTC has no name.
#pragma once

#include "types.cuh"

__device__ __forceinline__ float minus_infinity() {
  return __uint_as_float(0xFF800000u);
}
