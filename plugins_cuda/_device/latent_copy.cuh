// A warpgroup copies tiles of latents into shared memory; constants of latent_rows.cuh.
#pragma once

#include "latent_rows.cuh"
#include "ptx_attention.cuh"

constexpr int kCopyThreads = 128;
constexpr int kCopyTokens = kCopyThreads / 8;  // that are copied at once
constexpr int kCopies = kTile / kCopyTokens;

// Where in the pool the tokens of a tile are that this thread copies: eight threads have 128 bytes
// of one.
struct TileCopy {
  const uint4* from[kCopies];
  bool seen[kCopies];

  __device__ __forceinline__ static int thread() {
    return thread_index() % kCopyThreads;
  }

  // ``entry_of(token)``: a token's entry in the pool, negative where nobody sees it. What nobody
  // sees becomes zeros: a weight of 0 silences no NaN.
  template <class EntryOf>
  __device__ __forceinline__ void look_up(const uint4* c_pool, const EntryOf& entry_of) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int entry = entry_of(i * kCopyTokens + thread() / 8);
      seen[i] = entry >= 0;
      from[i] = c_pool + static_cast<int64_t>(max(entry, 0)) * kEntryUnits + thread() % 8;
    }
  }

  // Starts the copies of panels first … stop − 1, constants, to a stage. ``evict_first``:
  // something else had better stay in L2.
  template <bool evict_first = false>
  __device__ __forceinline__ void start(uint4* stage, int first, int stop) const {
    const int token = thread() / 8, unit = thread() % 8;
    uint4* const to = stage + token * 8 + (unit ^ (token % 8));
#pragma unroll
    for (int panel = first; panel < stop; ++panel) {
      if (kEntryUnits % 8 != 0 && panel * 8 + unit >= kEntryUnits) continue;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        uint4* const place = to + panel * kPanelUnits + i * kCopyTokens * 8;
        if (evict_first) {
          cp_async_16_or_zero_by(evict_first_policy(), place, from[i] + panel * 8, seen[i]);
        } else {
          cp_async_16_or_zero(place, from[i] + panel * 8, seen[i]);
        }
      }
    }
  }
};
