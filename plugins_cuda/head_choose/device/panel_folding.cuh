// Reduces tiles of the vocabulary for many rows. A lane reduces a tile of one row, in the order of
// kernel.cu's merges between lanes, so that the bits are equal.
#pragma once

#include "../../_device/final_logit.cuh"
#include "config.cuh"
#include "fold.cuh"

// kTiles: tiles of a warp at once. The rows of a warp pass through ``places``, 32 at a time.
template <int kColumns, int kTiles, int kWarps, class Kept>
struct PanelFolding {
  // A stride of 40 floats avoids bank conflicts, both of a quarter warp that stores pairs and of
  // one that reads a row.
  static constexpr int kTurnRows = 32, kTurns = (kColumns + kTurnRows - 1) / kTurnRows;
  static constexpr int kStride = 40, kWarpFloats = 16 * kStride;
  static constexpr int kBytes = kWarps * kWarpFloats * 4;

  Sampling* sampling;  // [kColumns]
  Fold* folds;         // [kWarps · kTiles segments in progress][kColumns]
  float* places;       // [kWarps][16 tokens][kStride]
  SegmentFolds out;
  Kept kept;
  int first_row, live;

  template <class Chunks>
  __device__ __forceinline__ void operator()(const Chunks& chunks, int round,
                                             const float (&sums)[kTiles][kColumns / 2]) const {
    const int warp = threadIdx.x / 32;
    float* place = places + warp * kWarpFloats;
#pragma unroll 1
    for (int turn = 0; turn < kTiles * kTurns; ++turn) {
      auto own = chunks.own[0];
#pragma unroll
      for (int i = 0; i < kTiles * kTurns; ++i) {
        if (i != turn) continue;
        own = chunks.own[i / kTurns];
        put(place, sums[i / kTurns], i % kTurns);
      }
      __syncwarp();
      const int row = turn % kTurns * kTurnRows + static_cast<int>(threadIdx.x) % 32;
      if (own.is_own(round) && row < live) {
        if (kept.wants(row)) keep_tile(place, row, own.first_tile(round) * 16);
        Fold& segment = folds[(turn / kTurns * kWarps + warp) * kColumns + row];
        int first_token = own.first_tile(round) * 16;
        if constexpr (Kept::kIsPart) first_token += kept.first;
        segment.merge(of_tile(place, sampling[row], first_token));
        if (own.ends_segment(round)) out.store(segment, first_row + row, own.segment(round));
      }
      __syncwarp();
    }
  }

 private:
  // Store the logits of 32 rows: tokens g and g + 8 of pairs of rows from each lane.
  static __device__ __forceinline__ void put(float* place, const float (&sums)[kColumns / 2],
                                             int turn) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < kTurnRows / 8; ++j) {
      const int n = turn * (kTurnRows / 8) + j;
      if (n >= kColumns / 8) break;
      float* to = place + 8 * j + 2 * t;
      const auto pair = [&](int first) {
        return make_float2(final_logit<Config>(sums[first]), final_logit<Config>(sums[first + 1]));
      };
      *reinterpret_cast<float2*>(to + g * kStride) = pair(4 * n);
      *reinterpret_cast<float2*>(to + (g + 8) * kStride) = pair(4 * n + 2);
    }
  }

  // Store the logits of this lane's row.
  __device__ __forceinline__ void keep_tile(const float* place, int row, int first_token) const {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      kept.put(row, first_token + i, place[i * kStride + threadIdx.x % 32]);
    }
  }

  // Reduce this lane's row: tokens g and g + 8, then adjacent g, then pairs of them, then halves.
  static __device__ __forceinline__ Fold of_tile(const float* place, const Sampling how,
                                                 int first_token) {
    const float* logits = place + threadIdx.x % 32;
    const bool greedy = how.is_greedy();
    uint4 low_bits = {}, high_bits = {};
    Fold waiting[3], fold;
#pragma unroll
    for (int g = 0; g < 8; ++g) {
      const float low = logit_of<Config>(first_token + g, logits[g * kStride]);
      const float high = logit_of<Config>(first_token + g + 8, logits[(g + 8) * kStride]);
      float low_score = low, high_score = high;
      if (!greedy) {
        // Philox returns the noise of four tokens at once.
        if (g % 4 == 0) {
          const int draw = (first_token + g) / 4;
          low_bits = positional_bits(how.seed, how.position, draw);
          high_bits = positional_bits(how.seed, how.position, draw + 2);
        }
        low_score = how.noisy(low, gumbel(word(low_bits, g % 4)));
        high_score = how.noisy(high, gumbel(word(high_bits, g % 4)));
      }
      fold = Fold::of_two(first_token + g, low, low_score, first_token + g + 8, high, high_score);
      if (kPads<Config> && fold.maximum == minus_infinity()) fold.clear();
#pragma unroll
      for (int level = 0; level < 3; ++level) {
        if ((g >> level & 1) == 0) {
          waiting[level] = fold;
          break;
        }
        waiting[level].merge(fold);
        fold = waiting[level];
      }
    }
    return fold;
  }

  static __device__ __forceinline__ uint32_t word(const uint4& bits, int i) {
    return i == 0 ? bits.x : i == 1 ? bits.y : i == 2 ? bits.z : bits.w;
  }
};
