// MXFP4 values and scales, decoded to bf16 pairs.
//
// The layout is that of plugins_cuda/rms_moe/packing.py. A tile is a sequence of stages of up to 15
// steps (16 mma rows × 32 columns). A stage has 256 bytes of scales, and 256 bytes of values per
// step.
#pragma once

#include "bf16.cuh"
#include "ptx.cuh"
#include "ptx_bf16.cuh"
#include "types.cuh"

constexpr int kStageSteps = 15;
constexpr int kStepBytes = 256;
constexpr int kStageBytes = kStepBytes * (kStageSteps + 1);

// 2^(scale − 1) of bytes ``odd`` and ``odd`` + 2 of four scales, in the low and the high half. The
// exponent field of bf16 is scale + 126.
__device__ __forceinline__ uint32_t alternate_scales(uint32_t scales, int odd) {
  return __byte_perm(scales, 0u, 0x4240u + 0x101u * odd) * 128u + 0x3F003F00u;
}

// Convert eight values to four bf16 pairs with the bits of e2m1 at 8:6 of a half: e2m1 · 2^-126,
// subnormal for ±0.5. It takes nine instructions, because the packing allows three masks and a
// merge.
__device__ __forceinline__ void place_word(uint32_t word, uint32_t (&pairs)[4]) {
  constexpr uint32_t kPair = 0x81C081C0u;
  pairs[0] = word & kPair;
  pairs[1] = (word << 6) & kPair;
  pairs[2] = ((word >> 4) | (word << 28)) & kPair;
  pairs[3] = ((word << 2) & 0x80C080C0u) | ((word >> 6) & 0x01000100u);
}

// Multiply eight values by the scale in both halves of ``scale`` (2^(scale − 1)), exactly.
__device__ __forceinline__ void decode_word(uint32_t word, uint32_t scale, uint32_t (&pairs)[4]) {
  place_word(word, pairs);
#pragma unroll
  for (uint32_t& pair : pairs) pair = mul_bf16x2(pair, scale);
}

// The same with the scale in one half of ``scales``.
template <int half>
__device__ __forceinline__ void decode_word_by_half(uint32_t word, uint32_t scales,
                                                    uint32_t (&pairs)[4]) {
  place_word(word, pairs);
#pragma unroll
  for (uint32_t& pair : pairs) pair = mul_bf16x2_by_half<half>(pair, scales);
}
