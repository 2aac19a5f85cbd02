// The epilogue of RmsIndexer.
#pragma once

#include "../../_device/bf16.cuh"
#include "../../_device/l2_word.cuh"
#include "config.cuh"
#include "keys.cuh"

constexpr int kQueryTiles = Config::kHeads * Config::kWidth / 16, kKeyTiles = Config::kWidth / 16;
constexpr bool kWeighted = Config::kTileCount > kQueryTiles + kKeyTiles;

struct Tensors {
  const int* write_slot;
  KeyElement* key_pool;
  uint16_t* q;
  uint16_t* head_weights;

  // Return the cache slot of a token's key; 0 for a tile without keys.
  __device__ __forceinline__ int slot_of(int tile, int token) const {
    const bool keyed = tile >= kQueryTiles && tile < kQueryTiles + kKeyTiles;
    return keyed ? load_l2_int(write_slot + token) : 0;
  }

  // Store rows g and g + 8 of a tile, of one token.
  __device__ __forceinline__ void store(int tile, int g, int token, int slot, float low,
                                        float high) const {
    const uint16_t first = float_to_bf16(low), second = float_to_bf16(high);
    if (tile < kQueryTiles) {
      uint16_t* out =
          q + static_cast<int64_t>(token) * (Config::kHeads * Config::kWidth) + 16 * tile + g;
      out[0] = first;
      out[8] = second;
    } else if (tile < kQueryTiles + kKeyTiles) {
      KeyElement* out =
          key_pool + static_cast<int64_t>(slot) * Config::kWidth + 16 * (tile - kQueryTiles) + g;
      const uint32_t pair = as_keys(static_cast<uint32_t>(second) << 16 | first);
      out[0] = static_cast<KeyElement>(pair);
      out[8] = static_cast<KeyElement>(pair >> 8 * sizeof(KeyElement));
    } else {
      const int head = 16 * (tile - kQueryTiles - kKeyTiles) + g;
      uint16_t* out = head_weights + static_cast<int64_t>(token) * Config::kHeads + head;
      if (head < Config::kHeads) out[0] = first;
      if (head + 8 < Config::kHeads) out[8] = second;
    }
  }

  __device__ __forceinline__ void weigh_evenly(int tokens, int first) const {
    if (kWeighted || blockIdx.x != 0) return;
    for (int i = threadIdx.x; i < tokens * Config::kHeads; i += Config::kWarps * 32) {
      head_weights[static_cast<int64_t>(first) * Config::kHeads + i] = float_to_bf16(1.0f);
    }
  }
};
