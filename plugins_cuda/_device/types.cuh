// Fixed-width integers, dynamic shared memory and constants of nearly all kernels, for NVRTC and
// the emulator.
#pragma once

#ifndef SPECBUILD_EMULATE

#ifdef __CUDACC_RTC__
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;
#else
#include <cstdint>
#endif

#define DYNAMIC_SHARED(type, name)                                            \
  extern __shared__ __align__(1024) unsigned char specbuild_dynamic_shared[]; \
  type* const name = reinterpret_cast<type*>(specbuild_dynamic_shared)

#endif

// The mask of all lanes, for shuffles and votes.
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

// Round up to a multiple.
template <typename T>
__host__ __device__ constexpr T round_up(T value, T multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

template <typename T>
__host__ __device__ constexpr T ceil_div(T value, T divisor) {
  return (value + divisor - 1) / divisor;
}
