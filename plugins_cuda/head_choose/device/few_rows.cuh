// The streaming launch of HeadChoose for a few rows: reduces segments of the vocabulary.
#pragma once

#include "../../_device/final_logit.cuh"
#include "../../_device/head_stream.cuh"
#include "config.cuh"
#include "fold.cuh"

using Head = HeadOfFew<Config>;
using Units = Head::Units;
using Shape = Head::Shape;
using Chunks = Head::Chunks;
using Fragments = Head::Fragments;

// Reduces tiles of the vocabulary for the rows from first_row on. The lanes of a warp merge their
// results after each tile, so that a segment has one fold per row, in shared memory.
template <class Kept>
struct Folding {
  Sampling* sampling;  // [rows]
  Fold* folds;         // [warps, rows]
  SegmentFolds out;
  Kept kept;
  int first_row, live;

  __device__ __forceinline__ void operator()(const Chunks& chunks, int chunk,
                                             const float (&sums)[1][Config::kTokenTiles][4]) const {
    const int lane = threadIdx.x % 32;
    int token = chunks.first_tile(chunk) * 16 + lane / 4;
    if constexpr (Kept::kIsPart) token += kept.first;
    const bool ends = chunks.ends_segment(chunk);
#pragma unroll
    for (int n = 0; n < Config::kTokenTiles; ++n) {
      if (n * kTokensPerTile >= live) break;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = n * kTokensPerTile + lane % 4 * 2 + i;
        Fold fold;
        fold.clear();
        if (row < live) {
          const Sampling how = sampling[row];
          const float low = logit_of<Config>(token, final_logit<Config>(sums[0][n][i]));
          const float high = logit_of<Config>(token + 8, final_logit<Config>(sums[0][n][i + 2]));
          if (kept.wants(row)) {
            kept.put(row, token, low);
            kept.put(row, token + 8, high);
          }
          fold = Fold::of_two(token, low, how.score(low, token), token + 8, high,
                              how.score(high, token + 8));
          if (kPads<Config> && fold.maximum == minus_infinity()) fold.clear();
        }
        for (int mask = 4; mask < 32; mask *= 2) fold.merge(fold.of_lane(mask));
        if (row < live && lane < 4) {
          Fold& segment = folds[threadIdx.x / 32 * Shape::kMaxTokens + row];
          segment.merge(fold);
          if (ends) out.store(segment, first_row + row, chunks.segment(chunk));
        }
      }
    }
  }
};
