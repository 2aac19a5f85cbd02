// A pair of outputs of RmsQueryLatent: rows g and g + 8 of a tile for one token.
#pragma once

#include "../../_device/bf16.cuh"
#include "../../_device/ptx.cuh"
#include "../../_device/ptx_load.cuh"
#include "config.cuh"

constexpr int kTilesPerHead = Config::kHeadDim / 16, kHalf = Config::kHeadDim / 2;
constexpr int kQueryTiles = Config::kQHeads * kTilesPerHead;

struct Tensors {
  const float* cos;
  const float* sin;
  const int* positions;
  const int* write_slot;
  uint16_t* c_pool;
  uint16_t* q;
};

// The inputs of the epilogue of a pair, loaded in the order in which their addresses are available:
// constants, then the token's position or slot, then the tables at this position.
struct Pair {
  int tile, i, token;  // i: the index in a head, or in 16 columns of a latent
  float bias[2];
  int place;  // the token's position, or its slot
  float cosine, sine;

  Pair() = default;
  __device__ __forceinline__ Pair(int tile_, int g, int token_)
      : tile(tile_), i(tile_ < kQueryTiles ? tile_ % kTilesPerHead * 8 + g : g), token(token_) {}

  __device__ __forceinline__ bool is_latent() const {
    return tile >= kQueryTiles;
  }
  __device__ __forceinline__ void load_bias(const uint16_t* bias_row) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bias[half] = Config::kHasBias ? bf16_to_float(load_early_bf16(bias_row + 8 * half)) : 0.0f;
    }
  }
  __device__ __forceinline__ void load_place(const Tensors& tensors) {
    place = load_l2_int((is_latent() ? tensors.write_slot : tensors.positions) + token);
  }
  __device__ __forceinline__ void load_tables(const Tensors& tensors) {
    cosine = 1.0f;
    sine = 0.0f;
    if (is_latent()) return;
    const int64_t entry = static_cast<int64_t>(place) * kHalf + i;
    cosine = load_constant_float(tensors.cos + entry);
    sine = load_constant_float(tensors.sin + entry);
  }
  __device__ __forceinline__ void store(const Tensors& tensors, float low, float high) const {
    const uint16_t first = float_to_bf16(low + bias[0]), second = float_to_bf16(high + bias[1]);
    if (is_latent()) {
      uint16_t* out = tensors.c_pool + static_cast<int64_t>(place) * Config::kLatent +
                      16 * (tile - kQueryTiles) + i;
      out[0] = first;
      out[8] = second;
      return;
    }
    const float a = bf16_to_float(first), b = bf16_to_float(second);
    uint16_t* out =
        tensors.q +
        (static_cast<int64_t>(token) * Config::kQHeads + tile / kTilesPerHead) * Config::kHeadDim +
        i;
    out[0] = float_to_bf16(a * cosine - b * sine);
    out[kHalf] = float_to_bf16(b * cosine + a * sine);
  }
};
