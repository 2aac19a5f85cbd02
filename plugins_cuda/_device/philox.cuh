// Philox4x32-10 (Salmon et al., SC 2011), and the Gumbel noise of sampling.
//
// The noise of token v at a position depends on (seed, position, v) only: key (seed, 0), counter
// (position, v / 4, 0, 0), word v % 4.
#pragma once

#include "types.cuh"

__device__ __forceinline__ uint4 philox4x32_10(uint4 counter, uint2 key) {
  constexpr uint32_t kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u;
  constexpr uint32_t kKeyStep0 = 0x9E3779B9u, kKeyStep1 = 0xBB67AE85u;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t high0 = __umulhi(counter.x, kMultiplier0), low0 = counter.x * kMultiplier0;
    const uint32_t high1 = __umulhi(counter.z, kMultiplier1), low1 = counter.z * kMultiplier1;
    counter = make_uint4(high1 ^ counter.y ^ key.x, low1, high0 ^ counter.w ^ key.y, low0);
    key.x += kKeyStep0;
    key.y += kKeyStep1;
  }
  return counter;
}

// −log(−log u) with u = ((bits >> 9) + ½)·2⁻²³, strictly between 0 and 1.
__device__ __forceinline__ float gumbel(uint32_t bits) {
  const float u = (static_cast<float>(bits >> 9) + 0.5f) * 1.1920928955078125e-7f;
  return -logf(-logf(u));
}

// The four words of tokens 4·block … 4·block + 3.
__device__ __forceinline__ uint4 positional_bits(int seed, int position, int block) {
  return philox4x32_10(
      make_uint4(static_cast<uint32_t>(position), static_cast<uint32_t>(block), 0, 0),
      make_uint2(static_cast<uint32_t>(seed), 0));
}

// The noise of one token.
__device__ __forceinline__ float positional_gumbel(int seed, int position, int token) {
  const uint4 bits = positional_bits(seed, position, token / 4);
  const uint32_t even = token & 2 ? bits.z : bits.x, odd = token & 2 ? bits.w : bits.y;
  return gumbel(token & 1 ? odd : even);
}
