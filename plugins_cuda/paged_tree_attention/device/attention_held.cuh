// The merged states of a warp's tile runs, split by split, and of a CTA's splits.
//
// Config: the members of attention_slots.cuh and of attention_states.cuh.
#pragma once

#include "attention_slots.cuh"
#include "attention_states.cuh"
#include "config.cuh"

constexpr int kWarpHalves = kPairs * kSides;
constexpr int kPartHeads = kWarpHalves * kPlaces,
              kPartFloats = kPartHeads * Config::kWidth;  // of a warp
constexpr int kParts = Config::kRowWarps * kTeams;

// The index of column `column` of a place among WIDTH floats; places are in different banks.
__device__ __forceinline__ int part_column(int place, int column) {
  return (column / 8 ^ place % (Config::kWidth / 8)) * 8 + column % 8;
}

// The merged state of a split's tile runs so far: maximum (in units of log 2), sum, values. Other
// warps read it at the end of the split.
struct Held {
  float* values;  // [kPartHeads][WIDTH] of this warp, with columns as in part_column()
  float2* sums;   // [kPartHeads] of this warp

  __device__ __forceinline__ Held(float* all_values, float2* all_sums, int warp)
      : values(all_values + warp * kPartFloats), sums(all_sums + warp * kPartHeads) {}

  // Merge the next tile run; the first one overwrites the state.
  __device__ __forceinline__ void join(const States& chain, bool first) const {
    const int lane = opaque(threadIdx.x % 32);
#pragma unroll
    for (int i = 0; i < kWarpHalves; ++i) {
      const int m = i / kSides, j = i % kSides;
      float added = chain.sum[m][j], a = 1.0f, b = 0.0f;
      added += __shfl_xor_sync(kAllLanes, added, 1);
      added += __shfl_xor_sync(kAllLanes, added, 2);
      float2& of_head = sums[i * kPlaces + lane / 4];
      float2 all = first ? make_float2(no_maximum(), 0.0f) : of_head;
      const float top = __fmul_rn(chain.maximum[m][j], kScale);
      const bool joins = join_sums(all.x, all.y, top, added, a, b);
      __syncwarp();
      if (lane % 4 == 0) of_head = all;
      if (!joins && !first) continue;
#pragma unroll
      for (int n = 0; n < 2 * kSteps; ++n) {
        float2& mine = *held_pair(lane, i, n);
        const float2 before = first ? make_float2(0.0f, 0.0f) : mine;
        const float2 v = pair_of(chain.values[m], n, j);
        mine = make_float2(__fmaf_rn(v.x, b, __fmul_rn(before.x, a)),
                           __fmaf_rn(v.y, b, __fmul_rn(before.y, a)));
      }
    }
    __syncwarp();
  }

  // Write the states of `count` rows of the launch from `row` on to the workspaces.
  __device__ __forceinline__ void leave(const SlotStates& slots, int row, int count,
                                        int slot) const {
    const int lane = opaque(threadIdx.x % 32), g = lane / 4, t = lane % 4;
    const int head = Mma::kOfHalf == 1 ? g : g % Mma::kHeads;
    if (head >= Config::kGroup) return;
#pragma unroll
    for (int i = 0; i < kWarpHalves; ++i) {
      const int mine = Mma::kOfHalf == 1 ? i : i * Mma::kOfHalf + g / Mma::kHeads;
      if (mine >= count) continue;
      const unsigned place = SlotStates::place(row + mine, slot, head);
      float2* to =
          reinterpret_cast<float2*>(slots.values + place * (Config::kWidth / 4)) + kPairLane * t;
#pragma unroll
      for (int n = 0; n < 2 * kSteps; ++n) {
        to[pair_step(n)] = *held_pair(lane, i, n);
      }
      if (t == 0) slots.sums[place] = sums[i * kPlaces + g];
    }
  }

 private:
  // Pair n of a lane's place of a half.
  __device__ __forceinline__ float2* held_pair(int lane, int half, int n) const {
    const int g = lane / 4, t = lane % 4;
    float* place = values + (half * kPlaces + g) * Config::kWidth;
    return reinterpret_cast<float2*>(place + part_column(g, column_step(n) + kColumnLane * t));
  }
};

// The states of all teams at the end of a round.
struct HeldParts {
  const float* values;  // [kTeams][ROW_WARPS][kPartFloats]
  const float2* sums;   // [kTeams][ROW_WARPS][kPartHeads]

  // Return four columns of a head of a row of the CTA.
  __device__ __forceinline__ Part of_team(int team, int row, int head, int column) const {
    const int warp = team * Config::kRowWarps + row / Config::kRows,
              at = row % Config::kRows * Mma::kHeads + head;
    const int place = Mma::kOfHalf == 1 ? head : at % kPlaces;
    const float2 pair = sums[warp * kPartHeads + at];
    const float* from =
        values + warp * kPartFloats + at * Config::kWidth + part_column(place, column);
    return {pair.x, pair.y, *reinterpret_cast<const float4*>(from)};
  }

  // The same for a split whose tile runs belong to teams from `team` on, one each.
  __device__ __forceinline__ Part of_chains(int team, int row, int head, int column) const {
    Part slot = empty_part();
#pragma unroll
    for (int chain = 0; chain < kChains; ++chain) {
      join(slot, of_team(team + chain, row, head, column));
    }
    return slot;
  }
};

// The merged state of a CTA's splits. A thread has four columns of some heads; their maximum and
// sum are in registers.
struct Running {
  static constexpr int kAll = kRows * kQuads, kHeld = ceil_div(kAll, kThreads);
  float4* values;  // [kAll]
  float maximum[kHeld], sum[kHeld];

  __device__ __forceinline__ explicit Running(float4* all_values) : values(all_values) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      maximum[k] = no_maximum();
      sum[k] = 0.0f;
    }
  }

  // Merge the next `slots` splits, in order, for `rows` rows. Each belongs to a team or, with
  // `by_chains`, to one team per tile run.
  __device__ __forceinline__ void join_round(const HeldParts& held, int slots, bool by_chains,
                                             int rows) {
    each(rows, [&](int k, int i, int row, int head, int column) {
      Part all = so_far(k, i);
#pragma unroll 1
      for (int slot = 0; slot < slots; ++slot) {
        join(all, by_chains ? held.of_chains(slot * kChains, row, head, column)
                            : held.of_team(slot, row, head, column));
      }
      values[i] = all.values;
      maximum[k] = all.maximum;
      sum[k] = all.sum;
    });
  }

  // Store the results of rows first … first + rows − 1 of the launch.
  __device__ __forceinline__ void store(const SlotStates& slots, int first, int rows) {
    each(rows, [&](int k, int i, int row, int head, int column) {
      Part all = so_far(k, i);
      slots.store(all, first + row, head, column);
    });
  }

  // Write the states of a split to the workspaces, for rows first … first + rows − 1 of the launch.
  // Its tile runs belong to teams from `team` on.
  __device__ __forceinline__ static void leave_chains(const HeldParts& held, int team,
                                                      const SlotStates& slots, int first, int rows,
                                                      int slot) {
    each(rows, [&](int, int, int row, int head, int column) {
      const Part part = held.of_chains(team, row, head, column);
      const unsigned at = SlotStates::place(first + row, slot, head);
      slots.values[at * (Config::kWidth / 4) + column / 4] = part.values;
      if (column == 0) slots.sums[at] = make_float2(part.maximum, part.sum);
    });
  }

 private:
  __device__ __forceinline__ Part so_far(int k, int i) const {
    return maximum[k] == no_maximum() ? empty_part() : Part{maximum[k], sum[k], values[i]};
  }

  // Call `visit(index, place, row of the CTA, head, column)` for the elements of this thread.
  template <class Visit>
  __device__ __forceinline__ static void each(int rows, const Visit& visit) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int i = static_cast<int>(threadIdx.x) + k * kThreads, row = i / kQuads;
      const int head = i % kQuads * 4 / Config::kWidth, column = i % kQuads * 4 % Config::kWidth;
      if (i < kAll && row < rows) visit(k, i, row, head, column);
    }
  }
};
