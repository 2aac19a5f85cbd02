// The arguments of the decode kernels of attention, and the loads of a CTA's queries.
//
// Config: the members of attention_states.cuh.
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

// Synchronize the warps of a team.
__device__ __forceinline__ void sync_team(int team) {
  if (Config::kRowWarps == 1) {
    __syncwarp();
  } else {
    named_barrier_sync(1 + team, 32 * Config::kRowWarps);
  }
}

// Store unit `unit` of a query's head, word by word, where ldmatrix delivers it to its lane
// (query_lane).
__device__ __forceinline__ void store_query_words(uint4* to, int place, int unit, uint4 words) {
  const uint32_t (&word)[4] = reinterpret_cast<const uint32_t (&)[4]>(words);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint4* at = to + tile_unit<Config::kWidth>(place, (unit & -2) + half);
    reinterpret_cast<uint2*>(at)[unit % 2] =
        make_uint2(query_operand(word[half]), query_operand(word[half + 2]));
  }
}

// Start to copy all rows' queries, or load those of the only row; with quantized caches they are
// converted to f16.
__device__ __forceinline__ void load_queries(Queries& queries, uint4* to, const uint32_t* from,
                                             const Walk& walk, int first) {
  if (kRows == 1) {
    const int t = walk.lane % 4, head = walk.lane / 4;
    const int64_t q_head =
        (static_cast<int64_t>(first) * Config::kKvHeads + walk.kv_head) * Config::kGroup + head;
    queries.hold(from + q_head * (Config::kWidth / 2) + query_lane(t), head < Config::kGroup);
    return;
  }
  const uint4* units = reinterpret_cast<const uint4*>(from);
  constexpr int kHeadUnits = Config::kWidth / 8, kAll = kQueryRows * kHeadUnits;
  const unsigned thread = opaque(threadIdx.x);
#pragma unroll
  for (int k = 0; k < ceil_div(kAll, kThreads); ++k) {
    const unsigned i = thread + k * kThreads, place = i / kHeadUnits, head = place % Mma::kHeads;
    if (kAll % kThreads != 0 && i >= kAll) break;
    const int row = place / (kHalves * kPlaces * kPairs) * Config::kRows +
                    place / Mma::kHeads % (Mma::kAll * kPairs);
    const int target = first + min(row, walk.rows.count - 1);
    const bool real = head < Config::kGroup;
    const int64_t q_head =
        (static_cast<int64_t>(target) * Config::kKvHeads + walk.kv_head) * Config::kGroup;
    const int64_t unit = (q_head + (real ? head : 0)) * kHeadUnits + i % kHeadUnits;
    if constexpr (Config::kCodes) {
      const uint4 words = real ? units[unit] : make_uint4(0u, 0u, 0u, 0u);
      store_query_words(to, place, i % kHeadUnits, words);
    } else {
      cp_async_16_or_zero(to + tile_unit<Config::kWidth>(place, i % kHeadUnits), units + unit,
                          real);
    }
  }
}
