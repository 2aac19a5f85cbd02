// RmsMoe, third launch: down of all chosen experts, weighted, summed, and the residual.
//
//   x                 [ROWS, HIDDEN] bf16, in
//   down              [EXPERTS, HIDDEN / 8, tile bytes] u8, in, constant: see packing.py
//   down_bias         [EXPERTS, HIDDEN] bf16, in, constant
//   row_start         [SEQUENCES + 1] i32, in
//   y                 [ROWS, HIDDEN] bf16, out, for the live rows
//   workspace_h       [ROWS, TOP_K, INNER] bf16, in
//   workspace_logits  [ROWS, EXPERTS] f32, in: for up to 32 rows, of the live ones
//   workspace_routing ints, in: for more rows; see Routing in expert_routing.cuh
//   workspace_weights [ROWS, TOP_K] f32, in: for more rows
//   workspace_partial [ROWS, TOP_K, HIDDEN] f32 (SPREAD only): weighted results of the experts
//
// A unit is (item, tile): 8 output rows by the whole of INNER; one warp streams it (12.3 kB at
// 2880) and sums in a fixed order. The result with its bias, times the router's weight, is the
// *partial* of an entry; a row's partials are summed by ascending expert, rounded, and added to x.
//
// Gate/up lets this launch start only after its own wait for the router. The routing, row_start and
// x are therefore final from the start, and the weights are on their way while gate/up still runs,
// as far as shared memory holds a CTA of both; only h needs the wait.
//
// down_owned_rows, for few rows: a CTA owns up to 3 of the 360 tiles for all experts, so partials
// stay in shared memory, as does all of h. One row of GPT-OSS: 12 units on each of 96 CTAs and 8 on
// the others, 91 % of an even spread; 17.7 MB, 3.9 µs at 4.53 TB/s, of which 22 slots hold 61 %
// before h is there; then 2.7 µs of issue slots.
// SPREAD, for more rows, where reading all of h on every CTA (3 MB a row) would cost more: a CTA
// takes a run of neighbouring units as in gate/up, and add_experts sums the partials. Both forms
// give the same bits.
#include "../_device/expert_pool.cuh"
#include "../_device/expert_routing.cuh"
#include "../_device/expert_rows.cuh"
#include "../_device/mxfp4.cuh"
#include "../_device/ptx_early.cuh"

constexpr int kBlocks = INNER / 32;
constexpr int kSteps = ceil_div(kBlocks, 2);
constexpr int kTiles = HIDDEN / 8;
// An item's entries are of different rows.
constexpr int kPassRows = PASS_ROWS < ROWS ? PASS_ROWS : ROWS;

using Layout = Routing<ROWS, TOP_K, EXPERTS, PASS_ROWS>;

// The tile of a unit's number: of every item the tiles first, first + step, …, ``count`` of them.
struct Tiles {
  int count, first, step;
  __device__ __forceinline__ int item(int unit) const {
    return unit / count;
  }
  __device__ __forceinline__ int tile(int unit) const {
    return first + unit % count * step;
  }
};

struct TileOf {
  const unsigned char* down;
  const RoutedItem* items;
  Tiles tiles;
  __device__ __forceinline__ const unsigned char* operator()(int unit) const;
};
#if SPREAD
using Stream = TileStream<kSteps, RING_STAGES, TileOf>;
constexpr int kBarriers = WARPS * RING_STAGES;
#else
using Stream = TilePool<kSteps, SLOTS, WARPS, Layout::kItems * OWNED_TILES, TileOf>;
constexpr int kBarriers = Stream::kBarriers;
#endif

struct SharedDown {
  Layout::Shared routing;
  float weights[Layout::kEntries];
  Mbarrier full[kBarriers];
};

__device__ __forceinline__ const unsigned char* TileOf::operator()(int unit) const {
  const int tile = items[tiles.item(unit)].expert * kTiles + tiles.tile(unit);
  return down + static_cast<int64_t>(tile) * Stream::Cut::kTileBytes;
}

// One tile for at most 4 · columns_of_4 entries: ``store(i, g, sum)`` once per entry i and output
// row g. ``steps_of(step)`` calls step for each of the tile's. Columns n and n + 4 of an mma are
// one entry at the even and at the odd block of a step, mma rows g and g + 8 output row g at those
// blocks. ``row_of(i)`` is entry i's row in shared memory.
template <int columns_of_4, class Steps, class RowOf, class Store>
__device__ __forceinline__ void run_tile(Steps&& steps_of, int entry_count, RowOf&& row_of,
                                         Store&& store) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int last = entry_count - 1;
  const unsigned char* columns[columns_of_4];
#pragma unroll
  for (int n = 0; n < columns_of_4; ++n) {
    const int column = 4 * n + g % 4;
    columns[n] = row_of(column < last ? column : last) + g / 4 * 64 + 16 * t;
  }
  float sums[columns_of_4][4] = {};
  steps_of([&](int step, const uint32_t (&low)[4], const uint32_t (&high)[4]) {
#pragma unroll
    for (int n = 0; n < columns_of_4; ++n) {
      uint4 v = make_uint4(0, 0, 0, 0);
      if (kBlocks % 2 == 0 || step < kSteps - 1 || g < 4) {
        v = *reinterpret_cast<const uint4*>(columns[n] + 128 * step);
      }
      mma_bf16(sums[n], low, {v.x, v.y});
      mma_bf16(sums[n], high, {v.z, v.w});
    }
  });
#pragma unroll
  for (int n = 0; n < columns_of_4; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float odd_blocks = __shfl_xor_sync(~0u, sums[n][i + 2], 2);
      const int column = 4 * n + 2 * t + i;
      if (t < 2 && column <= last) store(column, g, sums[n][i] + odd_blocks);
    }
  }
}

// One unit; the partial of (entry, output row g) goes to partial[entry · entry_floats + g].
template <class Steps, class RowOf>
__device__ __forceinline__ void run_unit(Steps&& steps_of, const SharedDown& lists, RoutedItem item,
                                         int tile, const uint16_t* bias, float* partial,
                                         int entry_floats, RowOf&& row_of) {
  const int* entries = lists.routing.entries + item.first_entry;
  const int g = threadIdx.x % 32 / 4;
  const float row_bias = bf16_to_float(bias[item.expert * HIDDEN + 8 * tile + g]);
  const auto store = [&](int i, int row, float sum) {
    const int entry = entries[i];
    partial[entry * entry_floats + row] = lists.weights[entry] * (sum + row_bias);
  };
  if (kPassRows <= 4 || item.entries <= 4) {
    run_tile<1>(steps_of, item.entries, row_of, store);
  } else if (kPassRows <= 8 || item.entries <= 8) {
    run_tile<2>(steps_of, item.entries, row_of, store);
  } else {
    run_tile<4>(steps_of, item.entries, row_of, store);
  }
}

// x + the sum of a row's partials, which is rounded first.
__device__ __forceinline__ uint16_t add_partials(uint16_t x, const float* partial,
                                                 int entry_floats) {
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < TOP_K; ++k) sum += partial[k * entry_floats];
  return float_to_bf16(bf16_to_float(x) + bf16_to_float(float_to_bf16(sum)));
}

#if SPREAD

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
    down_spread(const unsigned char* __restrict__ down, const uint16_t* __restrict__ down_bias,
                const int* row_start, const uint16_t* workspace_h, const float* workspace_logits,
                const int* workspace_routing, const float* workspace_weights,
                float* workspace_partial) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ SharedDown lists;
  const int warp = threadIdx.x / 32;
  constexpr int kRingBytes = RING_STAGES * kStageBytes;
  unsigned char* const rows = shared + WARPS * kRingBytes;
  Stream stream(shared + warp * kRingBytes, lists.full + warp * RING_STAGES,
                TileOf{down, lists.routing.items, {kTiles, 0, 1}});
  stream.init();
  pdl_launch_dependents();
  const auto asked = lists.routing.ask(workspace_logits, row_start + SEQUENCES);
  lists.routing.read<true>(asked, workspace_logits, workspace_routing, workspace_weights,
                           lists.weights);
  const int units = lists.routing.item_count * kTiles, ctas = gridDim.x;
  const int first = units * static_cast<int>(blockIdx.x) / ctas;
  const int end = units * (static_cast<int>(blockIdx.x) + 1) / ctas;
  stream.start(first + warp, end, WARPS);

  pdl_wait();
  if constexpr (ROWS_RESIDENT) {
    copy_rows<INNER>(rows, Layout::kEntries, [&](int i) { return workspace_h + i * INNER; });
    cp_async_wait<0>();
    __syncthreads();
  }

  const auto gather = [&](int number) {
    const RoutedItem item = lists.routing.items[number];
    const int* entries = lists.routing.entries + item.first_entry;
    copy_rows<INNER>(rows, item.entries, [&](int i) { return workspace_h + entries[i] * INNER; });
  };
  run_units<ROWS_RESIDENT, kTiles, WARPS>(first, end, gather, [&](int unit) {
    const RoutedItem item = lists.routing.items[unit / kTiles];
    const int* entries = lists.routing.entries + item.first_entry;
    const int tile = unit % kTiles;
    run_unit([&](auto&& step) { stream.tile(step); }, lists, item, tile, down_bias,
             workspace_partial + 8 * tile, HIDDEN,
             [&](int i) -> const unsigned char* {
               return rows + (ROWS_RESIDENT ? entries[i] : i) * kActivationRowBytes<INNER>;
             });
  });
}

// Grid (HIDDEN / ADD_COLUMNS, ROWS), a thread per column.
extern "C" __global__ void __launch_bounds__(ADD_COLUMNS)
    add_experts(const uint16_t* x, const int* row_start, uint16_t* y,
                const float* workspace_partial) {
  pdl_launch_dependents();
  pdl_wait();
  const int row = blockIdx.y, column = blockIdx.x * ADD_COLUMNS + threadIdx.x;
  if (row >= load_l2_int(row_start + SEQUENCES) || column >= HIDDEN) return;
  y[row * HIDDEN + column] = add_partials(
      x[row * HIDDEN + column], workspace_partial + row * TOP_K * HIDDEN + column, HIDDEN);
}

#else

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
    down_owned_rows(const uint16_t* x, const unsigned char* __restrict__ down,
                    const uint16_t* __restrict__ down_bias, const int* row_start, uint16_t* y,
                    const uint16_t* workspace_h, const float* workspace_logits,
                    const int* workspace_routing, const float* workspace_weights) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ SharedDown lists;
  const int warp = threadIdx.x / 32, cta = blockIdx.x, ctas = gridDim.x;
  constexpr int kSlotBytes = SLOTS * kStageBytes, kEntryFloats = 8 * OWNED_TILES;
  constexpr int kRowBytes = kActivationRowBytes<INNER>;
  unsigned char* const rows = shared + kSlotBytes;
  auto* const partial = reinterpret_cast<float*>(rows + Layout::kEntries * kRowBytes);
  const Tiles tiles{(kTiles - cta + ctas - 1) / ctas, cta, ctas};
  Stream stream(shared, lists.full, TileOf{down, lists.routing.items, tiles});
  stream.init();
  pdl_launch_dependents();
  const auto asked = lists.routing.ask(workspace_logits, row_start + SEQUENCES);
  const int live = load_l2_int(row_start + SEQUENCES);
  lists.routing.read<true>(asked, workspace_logits, workspace_routing, workspace_weights,
                           lists.weights);
  const int units = lists.routing.item_count * tiles.count;
  stream.start(units);
  const int outputs = 8 * tiles.count;
  const auto place_of = [&](int i) {
    const int output = i % outputs;
    return i / outputs * HIDDEN + 8 * tiles.tile(output / 8) + output % 8;
  };
  const int own = threadIdx.x, ends = live * outputs;
  uint16_t residual = own < ends ? load_l2_bf16(x + place_of(own)) : uint16_t{0};

  pdl_wait();
  copy_rows<INNER>(rows, Layout::kEntries, [&](int i) { return workspace_h + i * INNER; });
  cp_async_wait<0>();
  __syncthreads();

  for (int unit = warp; unit < units; unit += WARPS) {
    const RoutedItem item = lists.routing.items[tiles.item(unit)];
    const int* entries = lists.routing.entries + item.first_entry;
    run_unit([&](auto&& step) { stream.tile(unit, step); }, lists, item, tiles.tile(unit),
             down_bias, partial + 8 * (unit % tiles.count), kEntryFloats,
             [&](int i) -> const unsigned char* { return rows + entries[i] * kRowBytes; });
  }
  __syncthreads();
  for (int i = own; i < ends; i += 32 * WARPS) {
    if (i != own) residual = load_l2_bf16(x + place_of(i));
    y[place_of(i)] = add_partials(
        residual, partial + i / outputs * TOP_K * kEntryFloats + i % outputs, kEntryFloats);
  }
}

#endif
