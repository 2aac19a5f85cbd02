// Loads from global memory, by what the kernel may assume of the address. ``constant``: no launch
// writes it. ``early``: the same, and the load stays before griddepcontrol.wait. ``l2``: a previous
// launch has written it.
#pragma once

#include "types.cuh"

#ifdef SPECBUILD_EMULATE

inline uint2 load_constant8(const void* address) {
  uint2 v;
  std::memcpy(&v, address, sizeof(v));
  return v;
}
inline uint32_t load_constant4(const void* address) {
  return *static_cast<const uint32_t*>(address);
}
inline uint32_t load_constant_byte(const void* address) {
  return *static_cast<const uint8_t*>(address);
}
inline float load_constant_float(const float* address) {
  return *address;
}
inline uint4 load_early16(const void* address) {
  return *static_cast<const uint4*>(address);
}
inline uint32_t load_early4(const void* address) {
  return *static_cast<const uint32_t*>(address);
}
inline uint16_t load_early_bf16(const uint16_t* address) {
  return *address;
}
inline uint16_t load_l2_bf16(const uint16_t* address) {
  return *address;
}

#else

// 8 bytes, without L1 allocation.
__device__ __forceinline__ uint2 load_constant8(const void* address) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "l"(address));
  return v;
}

__device__ __forceinline__ uint32_t load_constant4(const void* address) {
  uint32_t v;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(address));
  return v;
}

// Through L1, because adjacent bytes are loaded soon after.
__device__ __forceinline__ uint32_t load_constant_byte(const void* address) {
  uint32_t v;
  asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(v) : "l"(address));
  return v;
}

__device__ __forceinline__ float load_constant_float(const float* address) {
  float v;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(address));
  return v;
}

// Not ld.global.nc: ptxas moves such loads after griddepcontrol.wait, which defeats the prefetch.
__device__ __forceinline__ uint4 load_early16(const void* address) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

// Through L1, because lanes of a warp and subsequent loads share the line.
__device__ __forceinline__ uint32_t load_early4(const void* address) {
  uint32_t v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
  return v;
}

__device__ __forceinline__ uint16_t load_early_bf16(const uint16_t* address) {
  uint16_t v;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(address) : "memory");
  return v;
}

__device__ __forceinline__ uint16_t load_l2_bf16(const uint16_t* address) {
  uint16_t v;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(address) : "memory");
  return v;
}

#endif
