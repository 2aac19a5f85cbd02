// The rows of a CTA: their queries, and for prompt chunks also their visible keys, softmax and
// results. The softmax adds in another order than weigh_tile().
//
// Config: BATCH, KV_HEADS, GROUP, WIDTH, CODES, WORDS, WINDOW, SCALE, HAS_SINKS. The halves j = 0,
// 1 of an mma hold rows as in mma_rows.cuh.
#pragma once

#include "../../_device/attention_rows.cuh"
#include "../../_device/attention_softmax.cuh"
#include "../../_device/row_tile.cuh"
#include "cache_tile.cuh"
#include "config.cuh"
#include "mma_rows.cuh"

constexpr float kScale = static_cast<float>(Config::kScale) * kLog2E;
static_assert(Config::kScale > 0, "the greatest score stays so");

using Mma = MmaRows<Config::kGroup, 2>;  // several rows

// The visible keys of a row, by view slot.
struct Row {
  int index;  // in the launch
  int first;  // the first position of the window
  int chain;  // the last committed slot
  int end;    // the last slot
};

__device__ __forceinline__ Row open_row(int index, const int* row_slot, int tree_start,
                                        const int* ancestors) {
  const RowView view =
      view_of<Config::kWords, Config::kWindow>(row_slot[index], tree_start, ancestors);
  const int nodes = view.last - tree_start;
  const int end =
      view.last < 0 ? view.chain : tree_start + set_bit<Config::kWords>(ancestors, nodes);
  return {index, view.first, view.chain, end};
}

__device__ __forceinline__ bool tree_sees(const Row& row, int tree_start, int slot,
                                          const int* ancestor_bits) {
  const int* ancestors = ancestor_bits + row.index * Config::kWords;
  const int bit = slot - tree_start;
  if (bit < 0 || bit >= 32 * Config::kWords) return false;
  if (!(static_cast<uint32_t>(ancestors[bit / 32]) >> (bit % 32) & 1u)) return false;
  return tree_start + bits_below<Config::kWords>(ancestors, bit) >= row.first;
}

// The positions that are visible to any row of a tile, and those that are visible to all rows.
struct Sight {
  int first, end, full_first, full_last;

  __device__ __forceinline__ Sight(const Row* rows, int count)
      : first(rows[0].first), end(rows[0].end), full_first(first), full_last(rows[0].chain) {
    for (int i = 1; i < count; ++i) {
      first = min(first, rows[i].first);
      end = max(end, rows[i].end);
      full_first = max(full_first, rows[i].first);
      full_last = min(full_last, rows[i].chain);
    }
  }
};

// Set the scores of invisible keys to no_maximum, for 8·columns keys from view slot `from` on.
template <int columns>
__device__ __forceinline__ void hide_unseen(float (&score)[columns][4], const Row* rows, int from,
                                            int tree_start, const int* ancestor_bits) {
  static_assert(columns <= 16, "a bit for each of a lane's keys");
  from += static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int j = 0; j < kHalves; ++j) {
    const Row& row = rows[Mma::row(j)];
    uint32_t hidden = 0;
    if (row.end > row.chain) {
#pragma unroll 1
      for (int i = 0; i < 2 * columns; ++i) {
        const int slot = from + i / 2 * 8 + i % 2;
        if (slot <= row.chain || tree_sees(row, tree_start, slot, ancestor_bits)) continue;
        hidden |= 1u << i;
      }
    }
    const int first = row.first - from, end = row.end - from;
#pragma unroll
    for (int i = 0; i < 2 * columns; ++i) {
      const int slot = i / 2 * 8 + i % 2;
      const bool sees = slot >= first && slot <= end && !(hidden >> i & 1u);
      if (!sees) score[i / 2][2 * j + i % 2] = no_maximum();
    }
  }
}

// Convert the scores of half j to weights. `maximum` is that of the scores before the scale, `sum`
// that of this lane. Return the factor for the values so far.
template <int columns>
__device__ __forceinline__ float weigh(float (&score)[columns][4], int j, float& maximum,
                                       float& sum) {
  float top = maximum;
#pragma unroll
  for (int n = 0; n < columns; ++n) {
    top = fmaxf(top, fmaxf(score[n][2 * j], score[n][2 * j + 1]));
  }
  top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
  top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
  const float base = finite_maximum(top);
  const float rescale = exp2_fast(__fmul_rn(maximum - base, kScale));
  const float shift = -__fmul_rn(base, kScale);
  maximum = top;
  float added = 0.0f;
#pragma unroll
  for (int n = 0; n < columns; ++n) {
    float& low = score[n][2 * j];
    float& high = score[n][2 * j + 1];
    low = exp2_fast(__fmaf_rn(low, kScale, shift));
    high = exp2_fast(__fmaf_rn(high, kScale, shift));
    added += low + high;
  }
  sum = __fmaf_rn(sum, rescale, added);
  return rescale;
}

// Store the mean of half j's values for `row`, the row of this lane, if it is one of the launch
// (`real`).
template <int columns>
__device__ __forceinline__ void store_row(const float (&values)[columns][4], int j, float maximum,
                                          float sum, const Row& row, bool real, const float* sinks,
                                          uint32_t* attended) {
  const int g = Mma::head(), t = threadIdx.x % 4;
  sum += __shfl_xor_sync(kAllLanes, sum, 1);
  sum += __shfl_xor_sync(kAllLanes, sum, 2);
  if (g >= Config::kGroup || !real) return;
  Part all{__fmul_rn(maximum, kScale), sum, make_float4(1.0f, 0.0f, 0.0f, 0.0f)};
  if (Config::kHasSinks) join_sink(all, sinks[blockIdx.y * Config::kGroup + g]);
  const float scale = all.sum > 0.0f ? all.values.x / all.sum : 0.0f;
  const int64_t head = (row.index * Config::kKvHeads + blockIdx.y) * Config::kGroup + g;
  uint32_t* to = attended + head * (Config::kWidth / 2) + kPairLane * t;
#pragma unroll
  for (int n = 0; n < columns; ++n) {
    const float2 pair = pair_of(values, n, j);
    to[pair_step(n)] = pack_bf16x2(pair.x * scale, pair.y * scale);
  }
}

// Load the queries of an mma's rows as A operands of 16 columns each.
template <class AnyRow>
__device__ __forceinline__ void load_query_rows(uint32_t (&q)[Config::kWidth / 16][4],
                                                const uint32_t* queries, const AnyRow* rows) {
  const int g = Mma::head(), t = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < kHalves; ++j) {
    const int64_t head =
        (rows[Mma::row(j)].index * Config::kKvHeads + blockIdx.y) * Config::kGroup + g;
    const uint32_t* from = queries + head * (Config::kWidth / 2) + query_lane(t);
#pragma unroll
    for (int step = 0; step < Config::kWidth / 16; ++step) {
      q[step][j] = g < Config::kGroup ? query_operand(from[query_step(step, 0)]) : 0u;
      q[step][j + 2] = g < Config::kGroup ? query_operand(from[query_step(step, 1)]) : 0u;
    }
  }
}
