// What a warp's chains come to, slot by slot, and what the slots of a CTA come to.
//
// Constants of the kernel: those of attention_slots.cuh and of attention_states.cuh.
#pragma once

#include "attention_slots.cuh"
#include "attention_states.cuh"

constexpr int kWarpRows = kPairs * kSides;
constexpr int kPartHeads = kWarpRows * kHeads, kPartFloats = kPartHeads * WIDTH;  // of a warp
constexpr int kParts = ROW_WARPS * kTeams;

// Where column `column` of a head stands among WIDTH floats: heads differ in their banks.
__device__ __forceinline__ int part_column(int head, int column) {
  return (column / 8 ^ head % (WIDTH / 8)) * 8 + column % 8;
}

// What the chains of a slot come to so far, where other warps find it at the slot's end: maximum
// (in units of log 2), sum, values.
struct Held {
  float* values;  // [kPartHeads][WIDTH] of this warp, columns as part_column() has them
  float2* sums;   // [kPartHeads] of this warp

  __device__ __forceinline__ Held(float* all_values, float2* all_sums, int warp)
      : values(all_values + warp * kPartFloats), sums(all_sums + warp * kPartHeads) {}

  // Of a slot that nobody sees; its values are not read.
  __device__ __forceinline__ void clear() const {
    for (int i = threadIdx.x % 32; i < kPartHeads; i += 32) {
      sums[i] = make_float2(no_maximum(), 0.0f);
    }
  }

  // The next chain; the first one replaces what stands there.
  __device__ __forceinline__ void join(const States& chain, bool first) const {
    const int lane = made_anew(threadIdx.x % 32);
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
      const int m = i / kSides, j = i % kSides;
      float added = chain.sum[m][j], a = 1.0f, b = 0.0f;
      added += __shfl_xor_sync(kAllLanes, added, 1);
      added += __shfl_xor_sync(kAllLanes, added, 2);
      float2& of_head = sums[i * kHeads + lane / 4];
      float2 all = first ? make_float2(no_maximum(), 0.0f) : of_head;
      const float top = __fmul_rn(chain.maximum[m][j], kScale);
      const bool joins = join_sums(all.x, all.y, top, added, a, b);
      __syncwarp();
      if (lane % 4 == 0) of_head = all;
      if (!joins && !first) continue;
#pragma unroll
      for (int n = 0; n < 2 * kSteps; ++n) {
        float2& mine = *pair_of(lane, i, n);
        const float2 before = first ? make_float2(0.0f, 0.0f) : mine;
        const float (&v)[4] = chain.values[m][n];
        mine = make_float2(__fmaf_rn(v[2 * j], b, __fmul_rn(before.x, a)),
                           __fmaf_rn(v[2 * j + 1], b, __fmul_rn(before.y, a)));
      }
    }
    __syncwarp();
  }

  // To the workspaces, as the states of `count` rows of the launch from `row` on.
  __device__ __forceinline__ void leave(const SlotStates& slots, int row, int count,
                                        int slot) const {
    const int lane = made_anew(threadIdx.x % 32), g = lane / 4, t = lane % 4;
    if (g >= GROUP) return;
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
      if (i >= count) continue;
      const unsigned place = SlotStates::place(row + i, slot, g);
      float2* to = reinterpret_cast<float2*>(slots.values + place * (WIDTH / 4)) + t;
#pragma unroll
      for (int n = 0; n < 2 * kSteps; ++n) {
        to[4 * n] = *pair_of(lane, i, n);
      }
      if (t == 0) slots.sums[place] = sums[i * kHeads + g];
    }
  }

 private:
  // Columns 8n + 2t and the one behind it of a lane's head of a row.
  __device__ __forceinline__ float2* pair_of(int lane, int row, int n) const {
    const int g = lane / 4, t = lane % 4;
    float* head = values + (row * kHeads + g) * WIDTH;
    return reinterpret_cast<float2*>(head + part_column(g, 8 * n + 2 * t));
  }
};

// What the states of several teams come to. A thread has four columns of some heads: their maximum
// and sum in registers.
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

  // The states of teams from … to − 1, in order, into what `rows` rows have: `all_values` and
  // `all_sums` are those of [kTeams][ROW_WARPS] warps.
  __device__ __forceinline__ void join_teams(const float* all_values, const float2* all_sums,
                                             int from, int to, int rows) {
    each(rows, [&](int k, int i, int row, int head, int column) {
      Part part = so_far(k, i);
#pragma unroll 1
      for (int team = from; team < to; ++team) {
        const int warp = team * ROW_WARPS + row / ROWS, at = row % ROWS * kHeads + head;
        const float2 pair = all_sums[warp * kPartHeads + at];
        const float* head_values = all_values + warp * kPartFloats + at * WIDTH;
        join(part, {pair.x, pair.y,
                    *reinterpret_cast<const float4*>(head_values + part_column(head, column))});
      }
      values[i] = part.values;
      maximum[k] = part.maximum;
      sum[k] = part.sum;
    });
  }

  // The results of rows first … first + rows − 1 of the launch.
  __device__ __forceinline__ void store(const SlotStates& slots, int first, int rows) {
    each(rows, [&](int k, int i, int row, int head, int column) {
      Part all = so_far(k, i);
      slots.store(all, first + row, head, column);
    });
  }

  // To the workspaces, as the states of a slot of rows first … first + rows − 1 of the launch.
  __device__ __forceinline__ void leave(const SlotStates& slots, int first, int rows, int slot) {
    each(rows, [&](int k, int i, int row, int head, int column) {
      const unsigned at = SlotStates::place(first + row, slot, head);
      slots.values[at * (WIDTH / 4) + column / 4] = values[i];
      if (column == 0) slots.sums[at] = make_float2(maximum[k], sum[k]);
    });
  }

 private:
  __device__ __forceinline__ Part so_far(int k, int i) const {
    return maximum[k] == no_maximum() ? empty_part() : Part{maximum[k], sum[k], values[i]};
  }

  // What this thread has: `visit(number, place, row of the CTA, head, column)`.
  template <class Visit>
  __device__ __forceinline__ static void each(int rows, const Visit& visit) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int i = static_cast<int>(threadIdx.x) + k * kThreads, row = i / kQuads;
      const int head = i % kQuads * 4 / WIDTH, column = i % kQuads * 4 % WIDTH;
      if (i < kAll && row < rows) visit(k, i, row, head, column);
    }
  }
};
