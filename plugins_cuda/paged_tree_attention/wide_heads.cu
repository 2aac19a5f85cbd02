// PagedTreeAttention of heads wider than 128: steps and drafts, and prompts of heads of 512.
//
//   q … sinks, attended  see kernel.cu; selected is null
//   workspace_arrivals   i32  [T, KV_HEADS], zeros before and after; all three if CONTEXT_CTAS > 1
//   workspace_sums       f32  [T, KV_HEADS, SLOTS, GROUP, 2]
//   workspace_values     f32  [T, KV_HEADS, SLOTS, GROUP, WIDTH]
//
// Grid (CONTEXT_CTAS · ROW_CTAS, KV_HEADS, B). A CTA processes two rows of a sequence at once if
// both are causal, otherwise one, and every CONTEXT_CTAS-th split of SPLIT_KEYS positions. 16
// warps multiply: first the queries by 8 keys of a tile each, over a part of the width, then the
// weights of all keys by their columns of the values.
//
// Splits start at absolute positions, have separate states and are merged in order, in registers or
// from the workspace, by the same operations. The bits of a row therefore depend neither on the
// grid nor on other rows. From the workspace, all CTAs of the rows merge a part of the columns
// each. The kernel reads 4·WIDTH bytes per key and KV head, once for two rows.
#include "../_device/arrival.cuh"
#include "../_device/attention_rows.cuh"
#include "../_device/attention_tile.cuh"
#include "../_device/bf16.cuh"
#include "../_device/cta_barrier.cuh"
#include "../_device/infinity.cuh"
#include "device/config.cuh"
#include "device/pool_row.cuh"
#include "device/wide_states.cuh"

namespace {

constexpr int kUnits = kWidth / 8;
constexpr int kKeys = Config::kTileKeys;            // of a tile
constexpr int kShares = 8 * kWarps / kKeys;         // of the width, with separate sums of scores
constexpr int kRows = 2, kHeads = 8;                // of the 16 rows of an mma
constexpr int kShareSteps = kWidth / 16 / kShares;  // of 16 columns
constexpr int kTileUnits = kKeys * kUnits, kWarpKeys = kKeys / kWarps;
constexpr int kSplitTiles = Config::kSplitKeys / kKeys;
constexpr int kLookUps = 32 / kWarpKeys;  // tiles whose pages a warp looks up at once
constexpr int kBuffers = 3;               // a tile in use, two in flight
constexpr int kScoreStride = kKeys + 4, kWeightStride = kKeys + 8;
static_assert(Config::kSplitKeys % kKeys == 0 && Config::kGroup <= kHeads, "tiles are complete");
static_assert(kShareSteps % 2 == 0, "keys are loaded for two steps at once");
static_assert(kWarps == 16 && kKeys % kWarps == 0 && 32 % kWarpKeys == 0,
              "a lane has one key of a tile");

struct Shared {
  uint4* keys;     // [kBuffers][kTileUnits]
  uint4* values;   // [kBuffers][kTileUnits]
  uint4* queries;  // [16 rows][kUnits]
  float* scores;   // [kShares][16][kScoreStride]
  float* maximum;  // [16]: the maximum of a split so far; the next two likewise
  float* sum;      // [16]
  float* scale;    // [16]: the factor of the sums before this tile
  int* last;
  uint16_t* weights;  // [16][kWeightStride]

  __device__ explicit Shared(uint4* shared) {
    keys = shared;
    values = keys + kBuffers * kTileUnits;
    queries = values + kBuffers * kTileUnits;
    scores = reinterpret_cast<float*>(queries + 16 * kUnits);
    maximum = scores + kShares * 16 * kScoreStride;
    sum = maximum + 16;
    scale = sum + 16;
    last = reinterpret_cast<int*>(scale + 16);
    weights = reinterpret_cast<uint16_t*>(last + 4);
  }
};
static_assert(16 * (2 * kBuffers * kTileUnits + 16 * kUnits) +
                      4 * (kShares * 16 * kScoreStride + 3 * 16 + 4) + 2 * 16 * kWeightStride ==
                  Config::kSharedBytes,
              "as the launch says");

// The rows of a group and their visible positions.
struct Group {
  RowView views[kRows];
  const int* bits;  // of the first row, which may be in a tree
  int first, count, low, high;

  // Return the slot of a position's key in the sequence.
  __device__ __forceinline__ int slot_of(int position) const {
    const RowView& view = views[0];
    if (view.last < 0 || position <= view.chain) return position;
    return view.tree_start + set_bit<Config::kWords>(bits, position - view.tree_start);
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attend_wide(const uint4* q, const uint4* k_pool, const uint4* v_pool, const int* page_table,
                const int* row_start, const int* row_slot, const int* tree_start,
                const int* ancestor_bits, const float* sinks, const int* selected,
                uint16_t* attended, int* workspace_arrivals, float* workspace_sums,
                float* workspace_values) {
  DYNAMIC_SHARED(uint4, memory);
  pdl_launch_dependents();
  if constexpr (!Config::kEarly) pdl_wait();
  const Shared shared(memory);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4,
            t = lane % 4;
  const int sequence = blockIdx.z, kv_head = blockIdx.y;
  const int cta = static_cast<int>(blockIdx.x) / Config::kRowCtas;
  const int row_cta = static_cast<int>(blockIdx.x) % Config::kRowCtas;
  const int begin = load_l2_int(row_start + sequence), stop = load_l2_int(row_start + sequence + 1);
  const int start = load_l2_int(tree_start + sequence);
  const int view = sequence * Config::kViews + (Config::kViews > 1 ? kv_head / Config::kShare : 0);
  const States states{reinterpret_cast<float2*>(workspace_sums),
                      reinterpret_cast<float2*>(workspace_values)};
  const int* const table = page_table + view * Config::kTable;

  const auto view_at = [&](int row) {
    return view_of<Config::kWords, Config::kWindow>(load_l2_int(row_slot + row), start,
                                                    ancestor_bits + row * Config::kWords);
  };
  // The first row of a sequence has the lowest slot; the previous launch writes none below it.
  const int limit = begin < stop ? min(load_l2_int(row_slot + begin), start) : 0;
  bool waits = Config::kEarly;
  const auto attend = [&](const Group& rows) {
    const int splits_from = rows.low / Config::kSplitKeys;
    const int splits = rows.high / Config::kSplitKeys - splits_from + 1;
    // The first split of this CTA; splits are distributed by number.
    const int own =
        splits_from +
        (cta - splits_from % Config::kContextCtas + Config::kContextCtas) % Config::kContextCtas;
    if (own >= splits_from + splits) return;
    // The first position of tile ``number`` of this CTA. Its first split can start in the middle,
    // at a window.
    const int skipped = own == splits_from ? rows.low / kKeys % kSplitTiles : 0;
    const auto tile_at = [&](int number) {
      const int at = number + skipped;
      return (own + at / kSplitTiles * Config::kContextCtas) * Config::kSplitKeys +
             at % kSplitTiles * kKeys;
    };
    // Look up the slots and pages of the warp's keys in the tiles from ``number`` on: a lane has a
    // key of a tile.
    const auto look_up = [&](int number, int& slot, int& page) {
      const int position = tile_at(number + lane / kWarpKeys) + warp + lane % kWarpKeys * kWarps;
      const bool is_seen = position >= rows.low && position <= rows.high;
      slot = is_seen ? rows.slot_of(position) : 0;
      page = is_seen ? load_l2_int(table + slot / Config::kPageSize) : 0;
    };
    const auto fetch = [&](int number, int slot_of_lane, int page_of_lane) {
      const int tile = tile_at(number), from = number % kBuffers * kTileUnits;
      if (tile > rows.high) return;
#pragma unroll 1
      for (int i = 0; i < kWarpKeys; ++i) {
        const int key = warp + i * kWarps, position = tile + key;
        const bool seen = position >= rows.low && position <= rows.high;
        const int holder = number % kLookUps * kWarpKeys + i;
        const int64_t page = __shfl_sync(kAllLanes, page_of_lane, holder);
        const int64_t row = pool_row_of<Config::kKvHeads, Config::kShare, Config::kPageSize>(
            page, kv_head, __shfl_sync(kAllLanes, slot_of_lane, holder));
#pragma unroll
        for (int u = lane; u < kUnits; u += 32) {
          const int unit = from + tile_unit<kWidth>(key, u);
          cp_async_16_or_zero(shared.keys + unit, k_pool + row * kUnits + u, seen);
          cp_async_16_or_zero(shared.values + unit, v_pool + row * kUnits + u, seen);
        }
      }
    };

    int tile = tile_at(0), slot = 0, page = 0, later_slot, later_page;
    look_up(0, later_slot, later_page);
    // Whether the first tile is loaded before the previous launch has finished.
    const int early = waits && tile + kKeys <= limit;
    Joined joined;
    float sums[kParts][2][4];
    uint32_t queries[kShareSteps][4];  // of the warp's share of the width
    bool opens = true;                 // whether the tile starts a split
    // The code is short: a launch with few tiles executes it about once, and has to read it.
#pragma unroll 1
    for (int step = 0; tile <= rows.high; ++step) {
      if (step == early) {
        if (waits) pdl_wait();
        waits = false;
#pragma unroll 1
        for (int i = thread; i < 16 * kUnits; i += kThreads) {
          const int row = i / kUnits / kHeads, head = i / kUnits % kHeads;
          const bool real = row < rows.count && head < Config::kGroup;
          const int64_t from =
              (static_cast<int64_t>(rows.first + (real ? row : 0)) * Config::kKvHeads + kv_head) *
                  Config::kGroup +
              (real ? head : 0);
          cp_async_16_or_zero(shared.queries + tile_unit<kWidth>(i / kUnits, i % kUnits),
                              q + from * kUnits + i % kUnits, real);
        }
        cp_async_commit();
      }
      if (step % kLookUps == 0) {
        slot = later_slot, page = later_page;
        look_up(step + kLookUps, later_slot, later_page);
      }
      fetch(step, slot, page);
      cp_async_commit();
      const int number = step - (kBuffers - 1), buffer = number % kBuffers;
      if (number < 0) continue;
      if (opens) {
        if (thread < 16) shared.maximum[thread] = minus_infinity(), shared.sum[thread] = 0.0f;
#pragma unroll
        for (int part = 0; part < kParts; ++part)
#pragma unroll
          for (int i = 0; i < 8; ++i) sums[part][i / 4][i % 4] = 0.0f;
      }
      cp_async_wait<kBuffers - 1>();
      __syncthreads();

      // Scores of the warp's 8 keys, over its share of the width.
      const uint4* const keys = shared.keys + buffer * kTileUnits;
      const int first_key = 8 * warp % kKeys, share = 8 * warp / kKeys;
      if (number == 0) {
        const int row = lane % 8 + lane / 8 % 2 * 8;
#pragma unroll
        for (int i = 0; i < kShareSteps; ++i) {
          const int unit = 2 * (share * kShareSteps + i) + lane / 16;
          ldmatrix_x4(queries[i], shared.queries + tile_unit<kWidth>(row, unit));
        }
      }
      float score[4] = {0.0f, 0.0f, 0.0f, 0.0f}, other[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < kShareSteps; i += 2) {
        uint32_t b[4];
        const int unit = 2 * (share * kShareSteps + i) + lane / 8;
        ldmatrix_x4(b, keys + tile_unit<kWidth>(first_key + lane % 8, unit));
        const uint32_t low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
        mma_bf16(score, queries[i], low);
        mma_bf16(other, queries[i + 1], high);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
        shared.scores[(16 * share + g + i / 2 * 8) * kScoreStride + first_key + 2 * t + i % 2] =
            score[i] + other[i];
      __syncthreads();

      // Weights: a warp per row.
      {
        constexpr int kLaneKeys = kKeys / 32;
        const int row = warp, from = lane * kLaneKeys, of = row / kHeads;
        float value[kLaneKeys], top = minus_infinity();
#pragma unroll
        for (int i = 0; i < kLaneKeys; ++i) {
          const bool seen = of < rows.count && rows.views[of].sees(tile + from + i);
          float product = shared.scores[row * kScoreStride + from + i];
#pragma unroll
          for (int of_width = 1; of_width < kShares; ++of_width)
            product += shared.scores[(16 * of_width + row) * kScoreStride + from + i];
          value[i] =
              seen ? product * (static_cast<float>(Config::kScale) * kLog2E) : minus_infinity();
          top = fmaxf(top, value[i]);
        }
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2)
          top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, mask));
        const float before = shared.maximum[row], maximum = fmaxf(before, top);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kLaneKeys; ++i) {
          const float weight = value[i] == minus_infinity() ? 0.0f : exp2_fast(value[i] - maximum);
          sum += weight;
          shared.weights[row * kWeightStride + from + i] = float_to_bf16(weight);
        }
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(kAllLanes, sum, mask);
        __syncwarp();
        if (lane == 0) {
          const float scale = maximum == minus_infinity() ? 1.0f : exp2_fast(before - maximum);
          shared.scale[row] = scale;
          shared.sum[row] = __fmaf_rn(shared.sum[row], scale, sum);
          shared.maximum[row] = maximum;
        }
      }
      __syncthreads();

      // The warp's columns of the values.
      const uint4* const values = shared.values + buffer * kTileUnits;
      const float scales[2] = {shared.scale[g], shared.scale[g + 8]};
#pragma unroll
      for (int part = 0; part < kParts; ++part)
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[part][i / 4][i % 4] *= scales[i % 4 / 2];
#pragma unroll
      for (int key = 0; key < kKeys; key += 16) {
        uint32_t a[4];
        const int row = lane % 8 + lane / 8 % 2 * 8;
        ldmatrix_x4(a, shared.weights + row * kWeightStride + key + lane / 16 * 8);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          uint32_t left[2], right[2];
          load_value_columns<kWidth>(left, right, values, key, kParts * warp + part);
          mma_bf16(sums[part][0], a, left);
          mma_bf16(sums[part][1], a, right);
        }
      }
      const int next = tile_at(number + 1);
      const bool ends = next > rows.high || next / Config::kSplitKeys != tile / Config::kSplitKeys;
      if (ends) {
        const int split = tile / Config::kSplitKeys;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float m = shared.maximum[g + 8 * half], l = shared.sum[g + 8 * half];
          if constexpr (Config::kContextCtas == 1) {
            joined.take(half, m, l, sums);
          } else if (half < rows.count && g < Config::kGroup) {
            const int64_t state = States::place(rows.first + half, kv_head, split, g);
            if (warp == 0 && t == 0) states.sums[state] = make_float2(m, l);
#pragma unroll
            for (int part = 0; part < kParts; ++part)
#pragma unroll
              for (int side = 0; side < 2; ++side)
                states.values[state * (kWidth / 2) + 8 * (kParts * warp + part) + 4 * side + t] =
                    make_float2(sums[part][side][2 * half], sums[part][side][2 * half + 1]);
          }
        }
      }
      opens = ends;
      tile = next;
      __syncthreads();
    }
    cp_async_wait<0>();
    if constexpr (Config::kContextCtas > 1) {
      int* const count = workspace_arrivals + rows.first * Config::kKvHeads + kv_head;
      const int ctas = min(splits, Config::kContextCtas);
      const auto join = [&](int part) {
        states.join(rows.first, rows.count, kv_head, splits_from, splits, part, ctas, sinks,
                    attended);
      };
#ifdef SPECBUILD_EMULATE
      // The emulator runs CTAs in sequence, so the last one merges for all.
      if (!is_last_of(count, ctas, shared.last)) return;
      for (int part = 0; part < ctas; ++part) join(part);
#else
      CtaBarrier<kThreads - 1> others(count, ctas);
      others.wait();
      join(own - splits_from);
      others.leave();
#endif
      return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half >= rows.count || g >= Config::kGroup) continue;
      const int64_t head =
          (static_cast<int64_t>(rows.first + half) * Config::kKvHeads + kv_head) * Config::kGroup +
          g;
#pragma unroll
      for (int part = 0; part < kParts; ++part)
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const float* const pair = &joined.of[part][side][2 * half];
          *reinterpret_cast<uint32_t*>(attended + head * kWidth + 16 * (kParts * warp + part) +
                                       8 * side + 2 * t) =
              joined.softmax[half].result(pair[0], pair[1], sinks + kv_head * Config::kGroup + g);
        }
    }
  };

#pragma unroll 1
  for (int first = begin + row_cta * kRows; first < stop; first += Config::kRowCtas * kRows) {
    const int count = min(kRows, stop - first);
    Group rows;
    rows.bits = ancestor_bits + first * Config::kWords;
    rows.views[0] = view_at(first);
    rows.views[1] = view_at(first + count - 1);
    const bool together = rows.views[0].last < 0 && rows.views[1].last < 0;
#pragma unroll 1
    for (int one = 0; one < (together ? 1 : count); ++one) {
      rows.first = first + one;
      rows.count = together ? count : 1;
      if (one > 0) {
        rows.bits += Config::kWords;
        rows.views[0] = rows.views[1];
      }
      const RowView& other = rows.views[rows.count - 1];
      rows.low = min(rows.views[0].first, other.first);
      rows.high = max(rows.views[0].end(), other.end());
      attend(rows);
      __syncthreads();
    }
  }
  // A CTA without a split waits too: the launch ends after those before it.
  if (waits) pdl_wait();
}
