// The activation of an expert: its gate combined with its up row.
//
// Config: kActivation (0 SwiGLU, 1 SwiGLU of GPT-OSS with limits and a factor, 2 GELU by tanh
// instead of SiLU), kAlpha, kLimit.
#pragma once

#include "../../_device/ptx.cuh"
#include "config.cuh"

// Biases may be added before: −0 is the neutral element of addition, so compilers drop it.
__device__ __forceinline__ float gated(float gate, float up, float gate_bias = -0.0f,
                                       float up_bias = -0.0f) {
  constexpr float kLog2E = 1.4426950408889634f;
  if constexpr (Config::kActivation == 1) {
    constexpr float kLimit = Config::kLimit, kAlphaLog2 = Config::kAlpha * 1.4426950408889634;
    const float g = fminf(gate + gate_bias, kLimit);
    const float u = fminf(fmaxf(up + up_bias, -kLimit), kLimit);
    return __fdividef(g, 1.0f + exp2_fast(-kAlphaLog2 * g)) * (u + 1.0f);
  } else {
    const float g = gate + gate_bias;
    // GELU by tanh is x·σ(2√(2/π)·(x + 0.044715·x³)).
    const float z = Config::kActivation == 2 ? 1.59576912f * (g + 0.044715f * g * g * g) : g;
    return __fdividef(g, 1.0f + exp2_fast(-kLog2E * z)) * (up + up_bias);
  }
}
