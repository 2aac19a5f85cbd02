// The epilogue of Linear for the two outputs of a pair: bias, scale and residual.
#pragma once

#include "../../_device/bf16.cuh"
#include "../../_device/ptx_load.cuh"
#include "config.cuh"

// Multiply a projected value by SCALE and round again.
__device__ __forceinline__ uint16_t scaled(uint16_t value) {
  if (Config::kScale == 1) return value;
  return float_to_bf16(bf16_to_float(value) * Config::kScale);
}

struct Addends {
  float bias[2], residual[2];

  __device__ __forceinline__ void load_bias(const uint16_t* bias_row) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bias[half] = Config::kHasBias ? bf16_to_float(load_early_bf16(bias_row + 8 * half)) : 0.0f;
    }
  }
  __device__ __forceinline__ void load_residual(const uint16_t* residual_row) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      residual[half] =
          Config::kHasResidual ? bf16_to_float(load_l2_bf16(residual_row + 8 * half)) : 0.0f;
    }
  }
  __device__ __forceinline__ uint16_t apply(float sum, int half) const {
    const uint16_t projected = scaled(float_to_bf16(sum + bias[half]));
    return Config::kHasResidual ? float_to_bf16(residual[half] + bf16_to_float(projected))
                                : projected;
  }
};
