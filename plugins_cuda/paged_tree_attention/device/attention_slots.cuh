// The states of the context's splits in the workspaces, and their merge.
//
// Config: KV_HEADS, GROUP, WIDTH, SLOTS, HAS_SINKS.
#pragma once

#include "../../_device/attention_softmax.cuh"
#include "config.cuh"

constexpr int kQuads =
    Config::kGroup * Config::kWidth / 4;  // items of a row's threads, four columns each

struct SlotStates {
  float2* sums;    // [T, KV_HEADS, SLOTS, GROUP]: maximum in units of log 2, and sum
  float4* values;  // [T, KV_HEADS, SLOTS, GROUP, WIDTH / 4]
  const float* sinks;
  uint2* attended;

  // The index of head `head` of a split: 32 bits suffice, also for its columns, with 256 rows.
  __device__ __forceinline__ static unsigned place(unsigned row, unsigned slot, unsigned head) {
    return ((row * Config::kKvHeads + blockIdx.y) * Config::kSlots + slot) * Config::kGroup + head;
  }

  // Store four columns of a row's result.
  __device__ __forceinline__ void store(Part& all, int row, int head, int column) const {
    const unsigned q_head = (row * Config::kKvHeads + blockIdx.y) * Config::kGroup + head;
    if (Config::kHasSinks) join_sink(all, sinks[blockIdx.y * Config::kGroup + head]);
    attended[q_head * (Config::kWidth / 4) + column / 4] = mean_of(all);
  }

  // Merge the states of `count` rows from `first` on, over the splits for which `occupies` is true,
  // in order. `threads` threads call it; each loads `ahead` splits at once.
  template <int ahead = 16, class Occupies>
  __device__ __forceinline__ void join_rows(int first, int count, int thread, int threads,
                                            const Occupies& occupies) const {
    constexpr int kAhead = Config::kSlots < ahead ? Config::kSlots : ahead;
    for (int i = thread; i < count * kQuads; i += threads) {
      const int row = first + i / kQuads, quad = i % kQuads;
      const int head = quad * 4 / Config::kWidth, column = quad * 4 % Config::kWidth;
      Part all = empty_part();
      for (int slot = 0; slot < Config::kSlots; slot += kAhead) {
        const unsigned from = place(row, slot, head);
        const float4* from_values = values + from * (Config::kWidth / 4) + column / 4;
        Part part[kAhead];
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          part[k] = empty_part();
          if (slot + k >= Config::kSlots || !occupies(slot + k)) continue;
          const uint4 bits = load_l2_16(from_values + k * kQuads);
          const float2 pair = load_l2_float2(sums + from + k * Config::kGroup);
          part[k] = {pair.x, pair.y,
                     make_float4(__uint_as_float(bits.x), __uint_as_float(bits.y),
                                 __uint_as_float(bits.z), __uint_as_float(bits.w))};
        }
#pragma unroll
        for (int k = 0; k < kAhead; ++k) join(all, part[k]);
      }
      store(all, row, head, column);
    }
  }
};
