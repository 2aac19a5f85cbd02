// What the decode kernels of attention are given, and how a CTA's queries come into place.
//
// Config: those of attention_states.cuh.
#pragma once

#include "attention_states.cuh"
#include "config.cuh"

constexpr int kQueryRows = Config::kRowWarps * kPairs * kHalves * kPlaces;

struct Inputs {
  const uint32_t* q;
  const uint4* k_pool;
  const uint4* v_pool;
  const int* page_table;
  const int* row_start;
  const int* row_slot;
  const int* tree_start;
  const int* ancestor_bits;
  const float* sinks;
};

// The warps of a team wait for each other.
__device__ __forceinline__ void sync_team(int team) {
  if (Config::kRowWarps == 1) {
    __syncwarp();
  } else {
    named_barrier_sync(1 + team, 32 * Config::kRowWarps);
  }
}

// Starts the copies of all rows' queries, or loads the only row's.
__device__ __forceinline__ void load_queries(Queries& queries, uint4* to, const uint32_t* from,
                                             const Walk& walk, int first) {
  if (kRows == 1) {
    const int t = walk.lane % 4, head = walk.lane / 4;
    const int64_t q_head =
        (static_cast<int64_t>(first) * Config::kKvHeads + walk.kv_head) * Config::kGroup + head;
    queries.hold(from + q_head * (Config::kWidth / 2) + t, head < Config::kGroup);
    return;
  }
  const uint4* units = reinterpret_cast<const uint4*>(from);
  constexpr int kAll = kQueryRows * kUnits;
  const unsigned thread = made_anew(threadIdx.x);
#pragma unroll
  for (int k = 0; k < ceil_div(kAll, kThreads); ++k) {
    const unsigned i = thread + k * kThreads, place = i / kUnits, head = place % Mma::kHeads;
    if (kAll % kThreads != 0 && i >= kAll) break;
    const int row = place / (kHalves * kPlaces * kPairs) * Config::kRows +
                    place / Mma::kHeads % (Mma::kAll * kPairs);
    const int target = first + min(row, walk.rows.count - 1);
    const bool real = head < Config::kGroup;
    const int64_t q_head =
        (static_cast<int64_t>(target) * Config::kKvHeads + walk.kv_head) * Config::kGroup;
    const int64_t unit = (q_head + (real ? head : 0)) * kUnits + i % kUnits;
    cp_async_16_or_zero(to + tile_unit<Config::kWidth>(place, i % kUnits), units + unit, real);
  }
}
