// How the decode kernel's softmax states become one: over a slot's chains, then over the slots.
//
// Constants of the kernel: those of attention_slots.cuh and of attention_states.cuh, CONTEXT_CTAS,
// PAIRS_AT_ONCE (pairs of rows of a warp whose states are in shared memory together).
#pragma once

#include "attention_slots.cuh"
#include "attention_states.cuh"
#include "../../_device/meeting.cuh"

constexpr int kHeadFloats = WIDTH + 8;  // heads of a part begin in different banks
constexpr int kPartFloats = kHeads * kHeadFloats;
constexpr int kPartSides = PAIRS_AT_ONCE * kSides;  // rows of a warp that have parts at once
constexpr int kParts = ROW_WARPS * kPartSides * kChains;
constexpr int kItems = ceil_div(kPartSides * kQuads, kChunk);
static_assert(kPairs % PAIRS_AT_ONCE == 0, "pairs take turns");

// Joins states across teams in shared memory, across slots in the workspaces.
struct Joiner {
  float* parts;       // [ROW_WARPS][kPartSides][kChains][kHeads][kHeadFloats]
  float2* part_sums;  // [ROW_WARPS][kPartSides][kChains][kHeads]
  SlotStates slots;
  int chain, row_warp;

  // This warp's states of a pair of rows, for the others to read. The maximum is in units of log 2
  // there.
  __device__ __forceinline__ void publish(const States& states, int m) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < kSides; ++j) {
      const int side = m % PAIRS_AT_ONCE * kSides + j;
      const int part = (row_warp * kPartSides + side) * kChains + chain;
      float sum = states.sum[m][j];
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      const float maximum = __fmul_rn(states.maximum[m][j], kScale);
      if (t == 0) part_sums[part * kHeads + g] = make_float2(maximum, sum);
      float* to = parts + part * kPartFloats + g * kHeadFloats + 2 * t;
#pragma unroll
      for (int n = 0; n < 2 * kSteps; ++n) {
        const float (&v)[4] = states.values[m][n];
        *reinterpret_cast<float2*>(to + 8 * n) = make_float2(v[2 * j], v[2 * j + 1]);
      }
    }
  }

  // Number `k` of what a thread joins at once: four columns of a head of a side.
  struct Item {
    int side, head, column;

    __device__ __forceinline__ explicit Item(int k) {
      const unsigned i = threadIdx.x % kChunk + k * kChunk, quad = i % kQuads;
      side = i / kQuads, head = quad * 4 / WIDTH, column = quad * 4 % WIDTH;
    }

    __device__ __forceinline__ bool is_real() const {
      return kPartSides * kQuads % kChunk == 0 || side < kPartSides;
    }
  };

  // The states of a slot's chains become one.
  __device__ __forceinline__ Part slot_part(int side, int head, int column) const {
    Part slot = empty_part();
#pragma unroll
    for (int of = 0; of < kChains; ++of) {
      const int part = (row_warp * kPartSides + side) * kChains + of;
      const float2 pair = part_sums[part * kHeads + head];
      const float* values = parts + part * kPartFloats + head * kHeadFloats + column;
      join(slot, {pair.x, pair.y, *reinterpret_cast<const float4*>(values)});
    }
    return slot;
  }

  // Ends a slot, with all threads. `first`: the CTA's first row of the launch. The only slot that
  // its rows see is the result.
  __device__ __forceinline__ void end_slot(const States& states, const Rows& rows, int slot,
                                           int first) const {
    const bool only = SLOTS == 1 || rows.chunks() == 1;
#pragma unroll
    for (int m = 0; m < kPairs; m += PAIRS_AT_ONCE) {
#pragma unroll
      for (int n = 0; n < PAIRS_AT_ONCE; ++n) publish(states, m + n);
      __syncthreads();
      Part all[kItems];
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        const Item item(k);
        if (item.is_real()) all[k] = slot_part(item.side, item.head, item.column);
      }
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        const Item item(k);
        const int row = row_warp * ROWS + 2 * m + item.side;
        if (!item.is_real() || row >= rows.count) continue;
        if (only) {
          slots.store(all[k], first + row, item.head, item.column);
          continue;
        }
        const unsigned at = SlotStates::place(first + row, slot, item.head);
        slots.values[at * (WIDTH / 4) + item.column / 4] = all[k].values;
        if (item.column == 0) slots.sums[at] = make_float2(all[k].maximum, all[k].sum);
      }
      if (m + PAIRS_AT_ONCE < kPairs || CONTEXT_CTAS < SLOTS) __syncthreads();
    }
  }

  // All slots of all rows, in order.
  __device__ __forceinline__ void join_slots(const Rows& rows, int first) const {
    join_part(rows, first, 0, 1);
  }

  // The same by all CTAs that have such slots, each its part of the results once all slots are
  // there. `cta`: this one of CONTEXT_CTAS; `count`: 0 before and after; `last`: in shared memory,
  // which the emulated form alone needs.
  __device__ __forceinline__ void join_together(const Rows& rows, int first, int cta, int* count,
                                                volatile int* last) const {
    const int ctas = rows.ctas(CONTEXT_CTAS);
#ifdef SPECBUILD_EMULATE
    // CTAs run one after the other, so the last one joins for all.
    if (!is_last_of(count, ctas, last)) return;
    for (int of = 0; of < CONTEXT_CTAS; ++of) {
      if (!rows.occupy_cta(of, CONTEXT_CTAS)) continue;
      join_part(rows, first, rows.number_of(of, CONTEXT_CTAS), ctas);
    }
#else
    Meeting<kThreads - 1> others(count, ctas);
    others.wait();
    join_part(rows, first, rows.number_of(cta, CONTEXT_CTAS), ctas);
    others.leave();
#endif
  }

 private:
  // What CTA number `part` of `all` joins: 32 threads' worth of results by turns.
  __device__ __forceinline__ void join_part(const Rows& rows, int first, int part, int all) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    slots.join_rows(first, rows.count, (warp * all + part) * 32 + lane, kThreads * all,
                    [&](int slot) { return rows.occupy(slot); });
  }
};
