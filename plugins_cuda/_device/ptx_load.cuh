// Loads of constants that are narrower than 16 bytes.
#pragma once

#include "types.cuh"

#ifdef SPECBUILD_EMULATE

inline uint2 load_constant8(const void* p) {
  uint2 v;
  std::memcpy(&v, p, 8);
  return v;
}
inline uint32_t load_constant4(const void* p) {
  return *static_cast<const uint32_t*>(p);
}
inline uint32_t load_constant_byte(const void* p) {
  return *static_cast<const uint8_t*>(p);
}

#else

// 8 bytes of what no launch ever writes, past L1.
__device__ __forceinline__ uint2 load_constant8(const void* address) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "l"(address));
  return v;
}

// 4 bytes of what no launch ever writes.
__device__ __forceinline__ uint32_t load_constant4(const void* address) {
  uint32_t v;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(address));
  return v;
}

// One byte of what no launch ever writes, through L1: its neighbours are wanted soon.
__device__ __forceinline__ uint32_t load_constant_byte(const void* address) {
  uint32_t v;
  asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(v) : "l"(address));
  return v;
}

#endif
