// The epilogue of RmsHead.
#pragma once

#include "../../_device/final_logit.cuh"
#include "../../_device/types.cuh"
#include "config.cuh"

constexpr int kVocab = Config::kVocab;

// Stores a tile's logits of the rows from first_row on.
struct Store {
  float* out;
  int live;

  // sums[4n + i]: row g (i < 2) or g + 8 of the tile for row 8n + 2t + i % 2.
  __device__ __forceinline__ void operator()(int tile, const float* sums) const {
    const int lane = threadIdx.x % 32;
    float* first = out + tile * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < Config::kTokenTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = n * 8 + lane % 4 * 2 + i % 2;
        const bool is_token = !kPads<Config> || tile * 16 + lane / 4 + i / 2 * 8 < kVocab;
        if (row < live && is_token) {
          first[static_cast<int64_t>(row) * kVocab + i / 2 * 8] =
              final_logit<Config>(sums[4 * n + i]);
        }
      }
    }
  }
};
