// RoPE of a head with the pairs (i, i + D/2), eight pairs at a time.
#pragma once

#include "bf16.cuh"

// Cosines and sines of eight pairs.
struct Angles {
  float2 cos[4], sin[4];

  __device__ __forceinline__ void load(const float* cosines, const float* sines) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      cos[i] = *reinterpret_cast<const float2*>(cosines + 2 * i);
      sin[i] = *reinterpret_cast<const float2*>(sines + 2 * i);
    }
  }

  __device__ __forceinline__ void rotate(uint4& first, uint4& second) const {
    uint32_t* const a = &first.x;
    uint32_t* const b = &second.x;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 c = cos[i], s = sin[i];
      const float2 u = unpack_bf16x2(a[i]), v = unpack_bf16x2(b[i]);
      a[i] = pack_bf16x2(u.x * c.x - v.x * s.x, u.y * c.y - v.y * s.y);
      b[i] = pack_bf16x2(v.x * c.x + u.x * s.x, v.y * c.y + u.y * s.y);
    }
  }
};
