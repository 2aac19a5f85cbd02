// Prefill GEMMs whose first packed rows are heads of queries: tile j of a head holds rows 8j … 8j+7
// and D/2+8j … D/2+8j+7, which the rotation mixes.
//
// Compile-time constants: those of prefill_dense.cuh, HAS_BIAS, Q_HEADS, HEAD_DIM.
#pragma once

#include "prefill_biased.cuh"

// Cosines and sines of eight pairs (i, i + D/2) of a head.
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

struct HeadsGemm : BiasedGemm {
  static constexpr int kHeadTiles = HEAD_DIM / 16;
  const float* cos;
  const float* sin;
  const int* positions;
  const int* write_slot;
  uint16_t* q;

  // The angles of a token, and where it is cached.
  struct Place : Angles {
    int slot;
  };

  // Of a row's outputs in packed tile `packed`.
  __device__ __forceinline__ Place place_of(int row, int packed) const {
    Place at;
    at.slot = packed / kHeadTiles < Q_HEADS ? 0 : write_slot[row];
    const size_t angles =
        static_cast<size_t>(positions[row]) * (HEAD_DIM / 2) + 8 * (packed % kHeadTiles);
    at.load(cos + angles, sin + angles);
    return at;
  }
};
