// The softmax state of a tile run for a warp's rows, with wgmma, and the merge of a split's tile
// runs.
//
// Config: the members of chain_copy.cuh, attention_slots.cuh and prompt_rows.cuh.
#pragma once

#include "attention_slots.cuh"
#include "chain_copy.cuh"
#include "config.cuh"
#include "prompt_rows.cuh"
#include "row_pair.cuh"

// A descriptor whose lower half is incremented in units of 16 bytes, without a carry.
struct LowMatrix {
  uint64_t bits;

  __device__ __forceinline__ operator uint64_t() const {
    return bits;
  }
  __device__ __forceinline__ LowMatrix operator+(int units) const {
    return {(bits & 0xFFFFFFFF00000000u) | (static_cast<uint32_t>(bits) + units)};
  }
};

// The state of one tile run.
using Chain = RowPair<kTile>;

// The merged state of the tile runs of a split, in shared memory: four values of every eight
// columns, and maximum (in units of log 2) and sum of each half. Each thread has separate entries.
template <int threads>
struct Held {
  float4* units;  // [WIDTH / 8 + 1][threads], from this thread's on

  __device__ __forceinline__ float4& at(int i) const {
    return units[i * threads];
  }

  __device__ __forceinline__ void clear() const {
#pragma unroll
    for (int i = 0; i < Config::kWidth / 8; ++i) at(i) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    at(Config::kWidth / 8) = make_float4(no_maximum(), 0.0f, no_maximum(), 0.0f);
  }

  __device__ __forceinline__ void join(const Chain& chain) const {
    float added[kHalves], a[kHalves] = {}, b[kHalves] = {};
#pragma unroll
    for (int j = 0; j < kHalves; ++j) {
      added[j] = chain.sum[j];
      added[j] += __shfl_xor_sync(kAllLanes, added[j], 1);
      added[j] += __shfl_xor_sync(kAllLanes, added[j], 2);
    }
    float4 state = at(Config::kWidth / 8);
    const bool first =
        join_sums(state.x, state.y, __fmul_rn(chain.maximum[0], kScale), added[0], a[0], b[0]);
    const bool second =
        join_sums(state.z, state.w, __fmul_rn(chain.maximum[1], kScale), added[1], a[1], b[1]);
    at(Config::kWidth / 8) = state;
#pragma unroll
    for (int n = 0; n < Config::kWidth / 8; ++n) {
      float4 mine = at(n);
      const float (&v)[4] = chain.values[n];
      if (first) {
        mine.x = __fmaf_rn(v[0], b[0], __fmul_rn(mine.x, a[0]));
        mine.y = __fmaf_rn(v[1], b[0], __fmul_rn(mine.y, a[0]));
      }
      if (second) {
        mine.z = __fmaf_rn(v[2], b[1], __fmul_rn(mine.z, a[1]));
        mine.w = __fmaf_rn(v[3], b[1], __fmul_rn(mine.w, a[1]));
      }
      at(n) = mine;
    }
  }

  // Write the states of `count` rows from `row` on to the workspaces.
  __device__ __forceinline__ void leave(const SlotStates& slots, int row, int count,
                                        int slot) const {
    const int g = Mma::head(), t = threadIdx.x % 4;
    if (g >= Config::kGroup) return;
    for (int j = 0; Mma::row(j) < count; ++j) {
      const unsigned place = SlotStates::place(row + Mma::row(j), slot, g);
      float2* to = reinterpret_cast<float2*>(slots.values + place * (Config::kWidth / 4)) + t;
#pragma unroll
      for (int n = 0; n < Config::kWidth / 8; ++n) {
        const float4 mine = at(n);
        to[4 * n] = j == 0 ? make_float2(mine.x, mine.y) : make_float2(mine.z, mine.w);
      }
      const float4 state = at(Config::kWidth / 8);
      if (t > 0) continue;
      slots.sums[place] = j == 0 ? make_float2(state.x, state.y) : make_float2(state.z, state.w);
    }
  }
};
