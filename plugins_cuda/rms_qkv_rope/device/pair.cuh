// A pair of outputs of RmsQkvRope, rows g and g + 8 of a tile for one token.
#pragma once

#include "cache_codes.cuh"
#include "query_growth.cuh"
#include "../../_device/ptx.cuh"
#include "../../_device/ptx_load.cuh"
#include "config.cuh"

// Without keys and values it is not used as a divisor.
constexpr int kPoolHeads = Config::kKvHeads > 0 ? Config::kKvHeads : 1;
constexpr int kTilesPerHead = Config::kHeadDim / 16, kHalf = Config::kHeadDim / 2;

// With CODES the pools hold bytes. Keys without their norm go to [rows, KV_HEADS, HEAD_DIM].
struct Tensors {
  const float* cos;
  const float* sin;
  const int* positions;
  const int* write_slot;
  uint16_t* k_pool;
  uint16_t* v_pool;
  uint16_t* q;
};

// The inputs of a pair of outputs other than its sums. They are loaded as early as their addresses
// are known: constants, then the token's position and slot, then the tables at this position.
struct Pair {
  int head, i, token;
  float bias[2];
  int position, slot;
  float cosine, sine, growth;

  Pair() = default;
  __device__ __forceinline__ Pair(int tile, int g, int token_)
      : head(tile / kTilesPerHead), i(tile % kTilesPerHead * 8 + g), token(token_) {}

  __device__ __forceinline__ bool is_value() const {
    return head >= Config::kQHeads + Config::kKvHeads;
  }
  // Whether the output is quantized here. Keys that still need their norm are not.
  __device__ __forceinline__ bool is_coded() const {
    return Config::kCodes && (is_value() || (!Config::kHeadNorms && head >= Config::kQHeads));
  }
  __device__ __forceinline__ void load_bias(const uint16_t* bias_row) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bias[half] = Config::kHasBias ? bf16_to_float(load_early_bf16(bias_row + 8 * half)) : 0.0f;
    }
  }
  __device__ __forceinline__ void load_place(const Tensors& tensors) {
    position = load_l2_int(tensors.positions + token);
    slot = load_l2_int(tensors.write_slot + token);
  }
  __device__ __forceinline__ void load_tables(const Tensors& tensors) {
    cosine = 1.0f;
    sine = 0.0f;
    if (Config::kHeadNorms || is_value()) return;
    const int64_t entry = static_cast<int64_t>(position) * kHalf + i;
    cosine = load_constant_float(tensors.cos + entry);
    sine = load_constant_float(tensors.sin + entry);
    if (Config::kGrowth != 0)
      growth = head < Config::kQHeads ? growth_at(tensors.cos, position) : 1;
  }
  __device__ __forceinline__ void store(const Tensors& tensors, float low, float high) const {
    const float first = bf16_to_float(float_to_bf16(low + bias[0]));
    const float second = bf16_to_float(float_to_bf16(high + bias[1]));
    uint16_t* out = place(tensors);
    if constexpr (Config::kCodes) {
      if (is_coded()) return store_codes(reinterpret_cast<uint8_t*>(out), first, second);
    }
    if (Config::kHeadNorms || is_value()) {
      out[0] = float_to_bf16(first);
      out[kHalf] = float_to_bf16(second);
    } else {
      out[0] = grown(float_to_bf16(first * cosine - second * sine));
      out[kHalf] = grown(float_to_bf16(second * cosine + first * sine));
    }
  }

 private:
  __device__ __forceinline__ uint16_t grown(uint16_t value) const {
    return Config::kGrowth == 0 ? value : float_to_bf16(bf16_to_float(value) * growth);
  }

  // Store the quantized values after rounding to bf16; the angle of a value is 0.
  __device__ __forceinline__ void store_codes(uint8_t* out, float first, float second) const {
    const uint16_t low = float_to_bf16(first * cosine - second * sine);
    const uint16_t high = float_to_bf16(second * cosine + first * sine);
    const uint32_t codes = cache_codes(bf16_to_float(low), bf16_to_float(high));
    out[0] = static_cast<uint8_t>(codes);
    out[kHalf] = static_cast<uint8_t>(codes >> 8);
  }

  __device__ __forceinline__ uint16_t* place(const Tensors& tensors) const {
    if (Config::kKvHeads == 0 || head < Config::kQHeads) {
      return tensors.q + (static_cast<int64_t>(token) * Config::kQHeads + head) * Config::kHeadDim +
             i;
    }
    uint16_t* pool = is_value() ? tensors.v_pool : tensors.k_pool;
    const int64_t kv_head = (head - Config::kQHeads) % kPoolHeads;
    if (Config::kCodes && !is_coded()) {
      return pool + (static_cast<int64_t>(token) * Config::kKvHeads + kv_head) * Config::kHeadDim +
             i;
    }
    const int64_t page = slot / Config::kPageSize;
    const int64_t entry =
        ((page * Config::kKvHeads + kv_head) * Config::kPageSize + slot % Config::kPageSize) *
        Config::kHeadDim;
    if (!Config::kCodes) return pool + entry + i;
    return reinterpret_cast<uint16_t*>(reinterpret_cast<uint8_t*>(pool) + entry + i);
  }
};
