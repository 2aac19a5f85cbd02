// A pair of outputs of the projection: rows g and g + 8 of a tile for one token.
#pragma once

#include "../../_device/bf16.cuh"
#include "config.cuh"

struct Projected {
  uint16_t* rows;  // [rows, 16·TILE_COUNT]
};

struct Pair {
  int64_t place;

  Pair() = default;
  __device__ __forceinline__ Pair(int tile, int g, int token)
      : place(static_cast<int64_t>(token) * (16 * Config::kTileCount) + 16 * tile + g) {}

  __device__ __forceinline__ void load_bias(const uint16_t*) {}
  __device__ __forceinline__ void load_place(const Projected&) {}
  __device__ __forceinline__ void load_tables(const Projected&) {}
  __device__ __forceinline__ void store(const Projected& to, float low, float high) const {
    to.rows[place] = float_to_bf16(low);
    to.rows[place + 8] = float_to_bf16(high);
  }
};
