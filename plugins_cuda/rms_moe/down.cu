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
//   workspace_partial [ROWS, TOP_K, HIDDEN] f32: weighted results of the experts
//
// A unit is (item, tile): 8 output rows by the whole of INNER; one warp streams it (12.3 kB at
// 2880) and sums in a fixed order. The result with its bias, times the router's weight, is the
// *partial* of an entry; add_experts sums a row's partials by ascending expert, rounds, and adds to
// x. A CTA takes a run of neighbouring units as in gate/up. One row of GPT-OSS: 10.9 units a CTA;
// 17.7 MB, 3.9 µs at 4.53 TB/s, 2.7 µs of issue slots.
//
// Gate/up lets this launch start only after its own wait for the router. The routing and row_start
// are therefore final from the start, and the first weights are on their way before the wait for h.
#include "../_device/expert_routing.cuh"
#include "../_device/expert_rows.cuh"
#include "../_device/mxfp4.cuh"

constexpr int kBlocks = INNER / 32;
constexpr int kSteps = ceil_div(kBlocks, 2);
constexpr int kTiles = HIDDEN / 8;
// An item's entries are of different rows.
constexpr int kPassRows = PASS_ROWS < ROWS ? PASS_ROWS : ROWS;

using Layout = Routing<ROWS, TOP_K, EXPERTS, PASS_ROWS>;
// Groups of 4 entries that a pass has at most.
constexpr int kMostOf4 = kPassRows <= 4 ? 1 : kPassRows <= 8 ? 2 : 4;

struct TileOf {
  const unsigned char* down;
  const RoutedItem* items;
  __device__ __forceinline__ const unsigned char* operator()(int unit) const;
};
using Stream = TileStream<kSteps, RING_STAGES, TileOf>;

struct SharedDown {
  Layout::Shared routing;
  float weights[Layout::kEntries];
  Mbarrier full[WARPS * RING_STAGES];
};

__device__ __forceinline__ const unsigned char* TileOf::operator()(int unit) const {
  const int tile = items[unit / kTiles].expert * kTiles + unit % kTiles;
  return down + static_cast<int64_t>(tile) * Stream::Cut::kTileBytes;
}

// One tile for at most 4 · columns_of_4 entries: ``store(i, g, sum)`` once per entry i and output
// row g. Columns n and n + 4 of an mma are one entry at the even and at the odd block of a step,
// mma rows g and g + 8 output row g at those blocks. ``row_of(i)`` is entry i's row in shared
// memory.
template <int columns_of_4, class RowOf, class Store>
__device__ __forceinline__ void run_tile(Stream& stream, int entry_count, RowOf&& row_of,
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
  stream.tile([&](int step, const uint32_t (&low)[4], const uint32_t (&high)[4]) {
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

// One unit; the partial of (entry, output row g) goes to partial[entry · HIDDEN + g].
template <class RowOf>
__device__ __forceinline__ void run_unit(Stream& stream, const SharedDown& lists, RoutedItem item,
                                         int tile, const uint16_t* bias, float* partial,
                                         RowOf&& row_of) {
  const int* entries = lists.routing.entries + item.first_entry;
  const int g = threadIdx.x % 32 / 4;
  const float row_bias = bf16_to_float(bias[item.expert * HIDDEN + 8 * tile + g]);
  const auto store = [&](int i, int row, float sum) {
    const int entry = entries[i];
    partial[entry * HIDDEN + row] = lists.weights[entry] * (sum + row_bias);
  };
  if (kMostOf4 == 1 || item.entries <= 4) {
    run_tile<1>(stream, item.entries, row_of, store);
  } else if (kMostOf4 == 2 || item.entries <= 8) {
    run_tile < kMostOf4<2 ? kMostOf4 : 2>(stream, item.entries, row_of, store);
  } else {
    run_tile<kMostOf4>(stream, item.entries, row_of, store);
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
    down_experts(const unsigned char* __restrict__ down, const uint16_t* __restrict__ down_bias,
                 const int* row_start, const uint16_t* workspace_h, const float* workspace_logits,
                 const int* workspace_routing, const float* workspace_weights,
                 float* workspace_partial) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ SharedDown lists;
  const int warp = threadIdx.x / 32;
  constexpr int kRingBytes = RING_STAGES * kStageBytes;
  unsigned char* const rows = shared + WARPS * kRingBytes;
  Stream stream(shared + warp * kRingBytes, lists.full + warp * RING_STAGES,
                TileOf{down, lists.routing.items});
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

  const auto gather = [&](int first_entry, int count) {
    const int* entries = lists.routing.entries + first_entry;
    copy_rows<INNER>(rows, count, [&](int i) { return workspace_h + entries[i] * INNER; });
  };
  run_units<ROWS_RESIDENT, kTiles, WARPS, PLACES>(
      lists.routing.items, first, end, gather, [&](int unit, int place) {
        const RoutedItem item = lists.routing.items[unit / kTiles];
        const int* entries = lists.routing.entries + item.first_entry;
        const int tile = unit % kTiles;
        run_unit(stream, lists, item, tile, down_bias, workspace_partial + 8 * tile,
                 [&](int i) -> const unsigned char* {
                   const int row = ROWS_RESIDENT ? entries[i] : item.first_entry + place + i;
                   return rows + row * kActivationRowBytes<INNER>;
                 });
      });
}

// Grid (HIDDEN / ADD_COLUMNS, ROWS), a thread per column: x + the sum of a row's partials, which is
// rounded first.
extern "C" __global__ void __launch_bounds__(ADD_COLUMNS)
    add_experts(const uint16_t* x, const int* row_start, uint16_t* y,
                const float* workspace_partial) {
  pdl_launch_dependents();
  pdl_wait();
  const int row = blockIdx.y, column = blockIdx.x * ADD_COLUMNS + threadIdx.x;
  if (row >= load_l2_int(row_start + SEQUENCES) || column >= HIDDEN) return;
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < TOP_K; ++k) sum += workspace_partial[(row * TOP_K + k) * HIDDEN + column];
  const float residual = bf16_to_float(x[row * HIDDEN + column]);
  y[row * HIDDEN + column] = float_to_bf16(residual + bf16_to_float(float_to_bf16(sum)));
}
