// What an expert's gate and its up row come to.
//
// Config: kActivation (0 SwiGLU, 1 GPT-OSS's, of limits and a factor of its own, 2 GELU by tanh in
// SiLU's place), kAlpha, kLimit.
#pragma once

#include "../../_device/ptx.cuh"
#include "config.cuh"

__device__ __forceinline__ float gated(float gate, float up) {
  constexpr float kLog2E = 1.4426950408889634f;
  if constexpr (Config::kActivation == 1) {
    constexpr float kLimit = Config::kLimit, kAlphaLog2 = Config::kAlpha * 1.4426950408889634;
    gate = fminf(gate, kLimit);
    up = fminf(fmaxf(up, -kLimit), kLimit);
    return __fdividef(gate, 1.0f + exp2_fast(-kAlphaLog2 * gate)) * (up + 1.0f);
  } else {
    // GELU by tanh is x·σ(2√(2/π)·(x + 0.044715·x³)).
    const float z =
        Config::kActivation == 2 ? 1.59576912f * (gate + 0.044715f * gate * gate * gate) : gate;
    return __fdividef(gate, 1.0f + exp2_fast(-kLog2E * z)) * up;
  }
}
