// What all launches share: the sizes of a layer, which rows are in chunks, SiLU and the gates.
#pragma once

#include "../../_device/bf16.cuh"
#include "../../_device/ptx.cuh"
#include "../../_device/ptx_load.cuh"
#include "config.cuh"

constexpr int kKeyWidth = Config::kKeyWidth, kValueWidth = Config::kValueWidth;
constexpr int kKeys = Config::kKeyHeads * kKeyWidth, kValues = Config::kValueHeads * kValueWidth;
constexpr int kSharers = Config::kValueHeads / Config::kKeyHeads;
constexpr int kChannels = Config::kChannels;
constexpr int kTail = Config::kTaps - 1, kWindow = kTail + Config::kNodes;
constexpr float kUnitEps = 1e-6f;
static_assert(kChannels == 2 * kKeys + kValues, "queries, keys and values");

// Load two neighbours; the index of the first is even.
__device__ __forceinline__ uint32_t load_l2_pair(const uint16_t* from) {
  return static_cast<uint32_t>(load_l2_int(reinterpret_cast<const int*>(from)));
}

__device__ __forceinline__ float silu(float x) {
  return x / (1.0f + expf(-x));
}

__device__ __forceinline__ float rounded(float x) {
  return bf16_to_float(float_to_bf16(x));
}

// Return β of a value head; `gates` has its logit, and the logit of the decay `heads` later.
__device__ __forceinline__ float beta_of(const uint16_t* gates) {
  return rounded(1.0f / (1.0f + expf(-bf16_to_float(load_l2_bf16(gates)))));
}

__device__ __forceinline__ float log_decay_of(const uint16_t* gates, int heads, float scale,
                                              float bias) {
  const float step = bf16_to_float(load_l2_bf16(gates + heads)) + bias;
  const float soft = step > 20.0f ? step : log1pf(expf(step));
  return scale * soft;
}

// Return the rows of a sequence in complete chunks of 64, by the position of its first row. Chunks
// start at multiples of 64; rows of an earlier step that are not yet applied exclude chunks.
__device__ __forceinline__ int rows_in_chunks(int position, int count, int replayed) {
  const bool begins = position == 0 || (position % 64 == 0 && replayed == 0);
  return begins ? count / 64 * 64 : 0;
}
