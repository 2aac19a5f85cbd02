// A warpgroup that copies tiles of latents to shared memory. Constants: see latent_rows.cuh.
#pragma once

#include "../../_device/ptx_attention.cuh"
#include "latent_rows.cuh"

constexpr int kCopyThreads = 128;
constexpr int kCopyTokens = kCopyThreads / 8;  // tokens that are copied at once
constexpr int kCopies = kTile / kCopyTokens;

// The index of this thread in the warpgroup: eight threads copy 128 bytes of a token at a time.
__device__ __forceinline__ int copy_thread() {
  return thread_index() % kCopyThreads;
}

// The pool addresses of the tokens of a tile that this thread copies.
struct TileCopy {
  const uint4* places[kCopies];
  bool seen[kCopies];

  // ``entry_of(token)`` is the pool entry of a token, negative if it is invisible. Invisible tokens
  // become zeros, because a weight of 0 does not cancel NaN.
  template <class EntryOf>
  __device__ __forceinline__ void look_up(const uint4* c_pool, const EntryOf& entry_of) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int entry = entry_of(i * kCopyTokens + copy_thread() / 8);
      seen[i] = entry >= 0;
      places[i] = c_pool + static_cast<int64_t>(max(entry, 0)) * kEntryUnits + copy_thread() % 8;
    }
  }

  __device__ __forceinline__ const uint4* place(int i) const {
    return places[i];
  }
  __device__ __forceinline__ bool sees(int i) const {
    return seen[i];
  }
};

// The same for visible tokens with adjacent entries. Addresses are computed, to save registers.
struct AdjoiningCopy {
  const uint4* c_pool;
  int entry;  // of the first

  __device__ __forceinline__ const uint4* place(int i) const {
    const uint4* const own = c_pool + static_cast<int64_t>(entry + copy_thread() / 8) * kEntryUnits;
    return own + copy_thread() % 8 + i * kCopyTokens * kEntryUnits;
  }
  __device__ __forceinline__ bool sees(int) const {
    return true;
  }
};

// Start to copy panels first … stop − 1, constants, to a stage. ``evict_first``: other data should
// stay in L2.
template <bool evict_first = false, class Copy>
__device__ __forceinline__ void start_copies(const Copy& copy, uint4* stage, int first, int stop) {
  const int token = copy_thread() / 8, unit = copy_thread() % 8;
  uint4* const to = stage + token * 8 + (unit ^ (token % 8));
  const uint64_t policy = evict_first ? evict_first_policy() : 0;
  const uint4* from[kCopies];
#pragma unroll
  for (int i = 0; i < kCopies; ++i) from[i] = copy.place(i);
#pragma unroll
  for (int panel = first; panel < stop; ++panel) {
    if (kEntryUnits % 8 != 0 && panel * 8 + unit >= kEntryUnits) continue;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      uint4* const place = to + panel * kPanelUnits + i * kCopyTokens * 8;
      if (evict_first) {
        cp_async_16_or_zero_by(policy, place, from[i] + panel * 8, copy.sees(i));
      } else {
        cp_async_16_or_zero(place, from[i] + panel * 8, copy.sees(i));
      }
    }
  }
}
