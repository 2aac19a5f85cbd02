// The places of the states that a CTA of latent attention writes. Constants: see latent_scores.cuh.
#pragma once

#include "config.cuh"
#include "latent_scores.cuh"

namespace {

// The place of a row of weights in the workspaces: (row of the launch, query head), or −1.
__device__ __forceinline__ int64_t place_of(int row, int first, int count) {
  const int g = row % kHeads, head = row / kHeads % kCtaHeads, j = row / kHeads / kCtaHeads;
  const int kv_head = static_cast<int>(blockIdx.y) * kCtaHeads + head;
  if (g >= Config::kGroup || kv_head >= Config::kKvHeads || j >= count) return -1;
  return (static_cast<int64_t>(first + j) * Config::kKvHeads + kv_head) * Config::kGroup + g;
}

// Write the states of a CTA without a tile.
__device__ __forceinline__ void leave_empty(int first, int count, float2* split_sums) {
  for (int split = blockIdx.x; split < Config::kSplit; split = next_split(split)) {
    if (split >= Config::kSplitsInUse) continue;
    for (int row = mix_thread(); row < kStates; row += kMixThreads) {
      const int64_t at = place_of(row, first, count);
      if (at >= 0)
        split_sums[at * Config::kPlaces + place_of_split(split)] = make_float2(no_maximum(), 0.0f);
    }
  }
}

}  // namespace
