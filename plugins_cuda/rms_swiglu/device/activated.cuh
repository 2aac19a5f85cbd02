// What a gate and its up row come to.
#pragma once

#include "../../_device/bf16.cuh"
#include "../../_device/ptx_load.cuh"
#include "config.cuh"

// ``bias_row``: the gate's, in front of the up row's by 8.
__device__ __forceinline__ uint16_t activated(float gate_sum, float up_sum,
                                              const uint16_t* bias_row) {
  if (Config::kHasBias) {
    gate_sum += bf16_to_float(load_early_bf16(bias_row));
    up_sum += bf16_to_float(load_early_bf16(bias_row + 8));
  }
  const float gate = bf16_to_float(float_to_bf16(gate_sum));
  const float up = bf16_to_float(float_to_bf16(up_sum));
  const float silu = bf16_to_float(float_to_bf16(gate / (1.0f + expf(-gate))));
  return float_to_bf16(silu * up);
}
