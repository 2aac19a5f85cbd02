// The merge of the decode kernel's softmax states: over a split's tile runs, then over the splits.
//
// Config: the members of attention_slots.cuh and of attention_states.cuh, CONTEXT_CTAS,
// HALVES_AT_ONCE (halves of a warp's m16 tiles whose states are in shared memory at the same time).
#pragma once

#include "attention_slots.cuh"
#include "attention_states.cuh"
#include "../../_device/cta_barrier.cuh"
#include "config.cuh"

constexpr int kHeadFloats = Config::kWidth + 8;  // heads of a part start in different banks
constexpr int kPartFloats = kPlaces * kHeadFloats;
constexpr int kAllHalves = kPairs * kSides;  // of a warp
constexpr int kPartRows = Config::kHalvesAtOnce * Mma::kOfHalf;
constexpr int kParts = Config::kRowWarps * Config::kHalvesAtOnce * kChains;
constexpr int kItems = ceil_div(kPartRows * kQuads, kChunk);
static_assert(kAllHalves % Config::kHalvesAtOnce == 0, "halves are processed in equal groups");

// Merges states across teams in shared memory, and across splits in the workspaces.
struct Joiner {
  float* parts;       // [ROW_WARPS][HALVES_AT_ONCE][kChains][kPlaces][kHeadFloats]
  float2* part_sums;  // [ROW_WARPS][HALVES_AT_ONCE][kChains][kPlaces]
  SlotStates slots;
  int chain, row_warp;

  // Publish this warp's states of a half; the maximum is in units of log 2.
  __device__ __forceinline__ void publish(const States& states, int half) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int m = half / kSides, j = half % kSides;
    const int part =
        (row_warp * Config::kHalvesAtOnce + half % Config::kHalvesAtOnce) * kChains + chain;
    float sum = states.sum[m][j];
    sum += __shfl_xor_sync(kAllLanes, sum, 1);
    sum += __shfl_xor_sync(kAllLanes, sum, 2);
    const float maximum = __fmul_rn(states.maximum[m][j], kScale);
    if (t == 0) part_sums[part * kPlaces + g] = make_float2(maximum, sum);
    float* to = parts + part * kPartFloats + g * kHeadFloats + kColumnLane * t;
#pragma unroll
    for (int n = 0; n < 2 * kSteps; ++n) {
      *reinterpret_cast<float2*>(to + column_step(n)) = pair_of(states.values[m], n, j);
    }
  }

  // Item `k` of a thread's merge: four columns of a head of one of the rows.
  struct Item {
    int row, head, column;

    __device__ __forceinline__ explicit Item(int k) {
      const unsigned i = threadIdx.x % kChunk + k * kChunk, quad = i % kQuads;
      row = i / kQuads, head = quad * 4 / Config::kWidth, column = quad * 4 % Config::kWidth;
    }

    __device__ __forceinline__ bool is_real() const {
      return kPartRows * kQuads % kChunk == 0 || row < kPartRows;
    }
  };

  // Merge the states of a split's tile runs.
  __device__ __forceinline__ Part slot_part(int row, int head, int column) const {
    const int half = row / Mma::kOfHalf, place = row % Mma::kOfHalf * Mma::kHeads + head;
    Part slot = empty_part();
#pragma unroll
    for (int of = 0; of < kChains; ++of) {
      const int part = (row_warp * Config::kHalvesAtOnce + half) * kChains + of;
      const float2 pair = part_sums[part * kPlaces + place];
      const float* values = parts + part * kPartFloats + place * kHeadFloats + column;
      join(slot, {pair.x, pair.y, *reinterpret_cast<const float4*>(values)});
    }
    return slot;
  }

  // End a split; all threads call it. `first` is the CTA's first row of the launch. If the rows
  // attend to one split only, its state is the result.
  __device__ __forceinline__ void end_slot(const States& states, const Rows& rows, int slot,
                                           int first) const {
    const bool only = Config::kSlots == 1 || rows.chunks() == 1;
#pragma unroll
    for (int half = 0; half < kAllHalves; half += Config::kHalvesAtOnce) {
#pragma unroll
      for (int n = 0; n < Config::kHalvesAtOnce; ++n) publish(states, half + n);
      __syncthreads();
      Part all[kItems];
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        const Item item(k);
        if (item.is_real()) all[k] = slot_part(item.row, item.head, item.column);
      }
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        const Item item(k);
        const int mine = half * Mma::kOfHalf + item.row, row = row_warp * Config::kRows + mine;
        if (!item.is_real() || row >= rows.count) continue;
        if (Config::kRowWarps > 1 && kAllHalves * Mma::kOfHalf != Config::kRows &&
            mine >= Config::kRows)
          continue;
        if (only) {
          slots.store(all[k], first + row, item.head, item.column);
          continue;
        }
        const unsigned at = SlotStates::place(first + row, slot, item.head);
        slots.values[at * (Config::kWidth / 4) + item.column / 4] = all[k].values;
        if (item.column == 0) slots.sums[at] = make_float2(all[k].maximum, all[k].sum);
      }
      if (half + Config::kHalvesAtOnce < kAllHalves || Config::kContextCtas < Config::kSlots)
        __syncthreads();
    }
  }

  // Merge all splits of all rows, in order.
  __device__ __forceinline__ void join_slots(const Rows& rows, int first) const {
    join_part(rows, first, 0, 1);
  }

  // The same by all CTAs with splits of these rows, a part of the results each, after all splits
  // are complete. `cta` is this one of CONTEXT_CTAS; `count` is 0 before and after; `last` is in
  // shared memory, and is used by the emulator only.
  __device__ __forceinline__ void join_together(const Rows& rows, int first, int cta, int* count,
                                                volatile int* last) const {
    const int ctas = rows.ctas(Config::kContextCtas);
#ifdef SPECBUILD_EMULATE
    // The emulator runs CTAs in sequence, so the last one merges for all.
    if (!is_last_of(count, ctas, last)) return;
    for (int of = 0; of < Config::kContextCtas; ++of) {
      if (!rows.occupy_cta(of, Config::kContextCtas)) continue;
      join_part(rows, first, rows.number_of(of, Config::kContextCtas), ctas);
    }
#else
    CtaBarrier<kThreads - 1> others(count, ctas);
    others.wait();
    join_part(rows, first, rows.number_of(cta, Config::kContextCtas), ctas);
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
