// The activation of a gate and an up value.
#pragma once

#include "../../_device/bf16.cuh"
#include "../../_device/ptx_load.cuh"
#include "config.cuh"

// SiLU, or GELU by tanh, which is x·σ(2√(2/π)·(x + 0.044715·x³)).
__device__ __forceinline__ float activation(float x) {
  const float z = Config::kActivation == 0 ? x : 1.59576912f * (x + 0.044715f * x * x * x);
  return x / (1.0f + expf(-z));
}

// ``bias_row`` is the bias of the gate; that of the up row is 8 further.
__device__ __forceinline__ uint16_t activated(float gate_sum, float up_sum,
                                              const uint16_t* bias_row) {
  if (Config::kHasBias) {
    gate_sum += bf16_to_float(load_early_bf16(bias_row));
    up_sum += bf16_to_float(load_early_bf16(bias_row + 8));
  }
  const float gate = bf16_to_float(float_to_bf16(gate_sum));
  const float up = bf16_to_float(float_to_bf16(up_sum));
  return float_to_bf16(bf16_to_float(float_to_bf16(activation(gate))) * up);
}
