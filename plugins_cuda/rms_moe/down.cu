// RmsMoe, third launch: down of all chosen experts, weighted, summed, and perhaps the residual.
//
//   x                 [ROWS, HIDDEN] bf16, in
//   down              [EXPERTS, HIDDEN / 8, tile bytes] u8, in, constant: see packing.py; with BF16
//                     bf16, 512 values per two blocks of INNER
//   down_bias         [EXPERTS, HIDDEN] bf16, in, constant
//   row_start         [SEQUENCES + 1] i32, in
//   y                 [ROWS, HIDDEN] bf16, out, for the live rows
//   workspace_h       [ROWS, TOP_K, INNER] bf16, in
//   workspace_logits  [ROWS, EXPERTS] f32, in: of the live rows
//   workspace_partial [ROWS, TOP_K, HIDDEN] f32: weighted results of the experts
//
// A tile is 8 output rows × INNER; a unit is (item, TILES neighbouring tiles). One warp streams a
// unit (12.3 kB per tile at 2880) and sums in a fixed order that does not depend on TILES. The
// result with its bias, times the router's weight, is the *partial* of an entry. add_experts sums a
// row's partials by ascending expert, rounds the sum, and adds x. A CTA takes a run of neighbouring
// units as in gate/up. One row of GPT-OSS: 10.9 tiles per CTA; 17.7 MB, 3.9 µs at 4.53 TB/s, 2.7 µs
// of issue slots.
//
// With one tile, an mma has its even and its odd blocks, and half of the products are unused: 4
// entries need two mma per step, 16 entries eight, and 2 kB of activations from shared memory. With
// two tiles, all rows of the mma share activations: half the mma, half the bytes.
//
// Gate/up lets this launch start only after its own wait for the router. Routing and row_start are
// therefore final from the start, and the first weights are in flight before the wait for h.
#include "../_device/l2_word.cuh"
#include "device/config.cuh"
#include "device/expert_routing.cuh"
#include "device/expert_rows.cuh"
#include "device/expert_stream.cuh"

constexpr int kBlocks = Config::kInner / 32;
constexpr int kSteps = ceil_div(kBlocks, 2);
constexpr int kExpertTiles = Config::kHidden / 8, kUnits = kExpertTiles / Config::kTiles;
static_assert(Config::kTiles <= 2 && kExpertTiles % Config::kTiles == 0,
              "a unit is of whole tiles of one item");
// An item's entries are of different rows.
constexpr int kItemRows = Config::kPassRows < Config::kRows ? Config::kPassRows : Config::kRows;

using Routed = RoutedRows<Config>;

struct TileOf {
  const unsigned char* down;
  const RoutedItem* items;
  __device__ __forceinline__ const unsigned char* operator()(int unit) const;
};
using Stream = TileStream<Config, kSteps, TileOf>;

struct SharedDown {
  Routed routing;
  float weights[Routed::kEntries];
  Stream::Barriers full[Config::kWarps];
};

__device__ __forceinline__ const unsigned char* TileOf::operator()(int unit) const {
  const int tile = items[unit / kUnits].expert * kExpertTiles + unit % kUnits * Config::kTiles;
  return down + static_cast<int64_t>(tile) * Stream::Cut::kTileBytes;
}

// Load an entry's activations at a step; ``at`` is the lane's address in step 0. The odd block of
// the last step can be missing: it is zeros.
__device__ __forceinline__ uint4 block_values(const unsigned char* at, int step, bool odd) {
  if (kBlocks % 2 != 0 && step == kSteps - 1 && odd) return make_uint4(0, 0, 0, 0);
  return *reinterpret_cast<const uint4*>(at + 128 * step);
}

// Multiply one tile by at most 4 · columns_of_4 entries: call ``store(0, i, sum)`` once per entry
// i, for output row g. Columns n and n + 4 of an mma are one entry at the even and the odd block of
// a step, mma rows g and g + 8 are output row g at those blocks. ``row_of(i)`` is entry i's row in
// shared memory.
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
  stream.group([&](int step, const StepOperands(&operands)[1]) {
#pragma unroll
    for (int n = 0; n < columns_of_4; ++n) {
      const uint4 v = block_values(columns[n], step, g >= 4);
      mma_bf16(sums[n], operands[0].low, {v.x, v.y});
      mma_bf16(sums[n], operands[0].high, {v.z, v.w});
    }
  });
#pragma unroll
  for (int n = 0; n < columns_of_4; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float odd_blocks = __shfl_xor_sync(~0u, sums[n][i + 2], 2);
      const int column = 4 * n + 2 * t + i;
      if (t < 2 && column <= last) store(0, column, sums[n][i] + odd_blocks);
    }
  }
}

// Multiply half ``half`` (0: row g, 1: row g + 8) of two tiles' operands as rows g and g + 8 of
// one.
template <int half>
__device__ __forceinline__ void mma_of_both(float (&sums)[4], const StepOperands (&tiles)[2],
                                            uint4 v) {
  const StepOperands &a = tiles[0], &b = tiles[1];
  mma_bf16(sums, {a.low[half], b.low[half], a.low[half + 2], b.low[half + 2]}, {v.x, v.y});
  mma_bf16(sums, {a.high[half], b.high[half], a.high[half + 2], b.high[half + 2]}, {v.z, v.w});
}

// Multiply two tiles by at most 8 · columns_of_8 entries: call ``store(tile, i, sum)`` once per
// entry i, for output row g of both. mma rows g and g + 8 are output row g of the first and of the
// second tile. Even and odd blocks of a step have separate sums, so the bits are those of run_tile.
template <int columns_of_8, class RowOf, class Store>
__device__ __forceinline__ void run_two_tiles(Stream& stream, int entry_count, RowOf&& row_of,
                                              Store&& store) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int last = entry_count - 1;
  const unsigned char* columns[columns_of_8];
#pragma unroll
  for (int n = 0; n < columns_of_8; ++n) {
    const int column = 8 * n + g;
    columns[n] = row_of(column < last ? column : last) + 16 * t;
  }
  float even[columns_of_8][4] = {}, odd[columns_of_8][4] = {};
  stream.group([&](int step, const StepOperands(&operands)[2]) {
#pragma unroll
    for (int n = 0; n < columns_of_8; ++n) {
      mma_of_both<0>(even[n], operands, block_values(columns[n], step, false));
      mma_of_both<1>(odd[n], operands, block_values(columns[n] + 64, step, true));
    }
  });
#pragma unroll
  for (int n = 0; n < columns_of_8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = 8 * n + 2 * t + i % 2;
      if (column <= last) store(i / 2, column, even[n][i] + odd[n][i]);
    }
  }
}

// Process one unit, whose first tile is ``tile``; the partial of (entry, output row) goes to
// partial[entry · HIDDEN + output row].
template <class RowOf>
__device__ __forceinline__ void run_unit(Stream& stream, const SharedDown& lists, RoutedItem item,
                                         int tile, const uint16_t* bias, float* partial,
                                         RowOf&& row_of) {
  constexpr int kMaxOf4 = ceil_div(kItemRows, 4), kMaxOf8 = ceil_div(kItemRows, 8);
  const int* entries = lists.routing.entries + item.first_entry;
  const int output = 8 * tile + threadIdx.x % 32 / 4;
  // Widening them here would stall the warp, so they are widened when they are used.
  uint16_t biases[Config::kTiles];
#pragma unroll
  for (int i = 0; i < Config::kTiles; ++i)
    biases[i] = bias[item.expert * Config::kHidden + output + 8 * i];
  const auto store = [&](int of_tile, int i, float sum) {
    const int entry = entries[i];
    const float biased = sum + bf16_to_float(biases[of_tile]);
    partial[entry * Config::kHidden + output + 8 * of_tile] = lists.weights[entry] * biased;
  };
  if constexpr (Config::kTiles == 2) {
    if (kMaxOf8 == 1 || item.entries <= 8) {
      run_two_tiles<1>(stream, item.entries, row_of, store);
    } else {
      run_two_tiles<kMaxOf8>(stream, item.entries, row_of, store);
    }
  } else if (kMaxOf4 == 1 || item.entries <= 4) {
    run_tile<1>(stream, item.entries, row_of, store);
  } else if (kMaxOf4 == 2 || item.entries <= 8) {
    run_tile<2>(stream, item.entries, row_of, store);
  } else {
    run_tile<kMaxOf4>(stream, item.entries, row_of, store);
  }
}

// The layout of memory.py.
static_assert(sizeof(SharedDown) <= Config::kStaticBytes, "static shared memory");
static_assert(Config::kWarps * Stream::kRingBytes +
                      Config::kPlaces * kActivationRowBytes<Config::kInner> <=
                  Config::kSharedBytes,
              "rings, then rows");

extern "C" __global__ void __launch_bounds__(32 * Config::kWarps, 1)
    down_experts(const unsigned char* __restrict__ down, const uint16_t* __restrict__ down_bias,
                 const int* row_start, const uint16_t* workspace_h, const float* workspace_logits,
                 float* workspace_partial) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ SharedDown lists;
  const int warp = threadIdx.x / 32;
  unsigned char* const rows = shared + Config::kWarps * Stream::kRingBytes;
  Stream stream(shared + warp * Stream::kRingBytes, lists.full[warp],
                TileOf{down, lists.routing.items});
  stream.init();
  pdl_launch_dependents();
  auto asked = lists.routing.ask(workspace_logits, row_start + Config::kSequences);
  lists.routing.clear();
  lists.routing.read(asked, workspace_logits, lists.weights);
  const int cta = blockIdx.x;
  const int first = lists.routing.first_unit<kUnits, Config::kCtas>(cta);
  const int end = lists.routing.first_unit<kUnits, Config::kCtas>(cta + 1);
  stream.start(first + warp, end, Config::kWarps);

  pdl_wait();
  if constexpr (Config::kRowsResident) {
    copy_rows<Config::kInner>(rows, Routed::kEntries,
                              [&](int i) { return workspace_h + i * Config::kInner; });
    cp_async_wait<0>();
    __syncthreads();
  }

  const auto gather = [&](int first_entry, int count) {
    const int* entries = lists.routing.entries + first_entry;
    copy_rows<Config::kInner>(rows, count,
                              [&](int i) { return workspace_h + entries[i] * Config::kInner; });
  };
  run_units<Config, kUnits>(lists.routing.items, first, end, gather, [&](int unit, int place) {
    const RoutedItem item = lists.routing.items[unit / kUnits];
    const int* entries = lists.routing.entries + item.first_entry;
    const int tile = unit % kUnits * Config::kTiles;
    run_unit(stream, lists, item, tile, down_bias, workspace_partial,
             [&](int i) -> const unsigned char* {
               const int row = Config::kRowsResident ? entries[i] : item.first_entry + place + i;
               return rows + row * kActivationRowBytes<Config::kInner>;
             });
  });
}

static_assert(Config::kAddColumns == 4 && Config::kHidden % 4 == 0,
              "a thread adds four columns, 16 bytes of fp32");

// Grid (HIDDEN / (4 · ADD_THREADS), ROWS), a thread for four columns: x (with RESIDUAL) + the sum
// of a row's partials, which is rounded first. There are few CTAs, and each issues all loads at
// once: a CTA of the next launch fills a multiprocessor, so it starts only after they end.
extern "C" __global__ void __launch_bounds__(Config::kAddThreads)
    add_experts(const uint16_t* x, const int* row_start, uint16_t* y,
                const float* workspace_partial) {
  pdl_launch_dependents();
  pdl_wait();
  const int row = blockIdx.y;
  const int column = 4 * static_cast<int>(blockIdx.x * Config::kAddThreads + threadIdx.x);
  if (column >= Config::kHidden) return;
  const int live = load_l2_int(row_start + Config::kSequences);
  const uint64_t residual =
      load_l2_word(reinterpret_cast<const uint64_t*>(x + row * Config::kHidden + column));
  uint4 partials[Config::kTopK];
#pragma unroll
  for (int k = 0; k < Config::kTopK; ++k) {
    partials[k] =
        load_l2_16(workspace_partial + (row * Config::kTopK + k) * Config::kHidden + column);
  }
  if (row >= live) return;
  float sums[4] = {};
#pragma unroll
  for (int k = 0; k < Config::kTopK; ++k) {
    sums[0] += __uint_as_float(partials[k].x);
    sums[1] += __uint_as_float(partials[k].y);
    sums[2] += __uint_as_float(partials[k].z);
    sums[3] += __uint_as_float(partials[k].w);
  }
  const float2 low = unpack_bf16x2(static_cast<uint32_t>(residual));
  const float2 high = unpack_bf16x2(static_cast<uint32_t>(residual >> 32));
  const float2 first = unpack_bf16x2(pack_bf16x2(sums[0], sums[1]));
  const float2 second = unpack_bf16x2(pack_bf16x2(sums[2], sums[3]));
  if constexpr (Config::kResidual == 0) {
    *reinterpret_cast<uint2*>(y + row * Config::kHidden + column) =
        make_uint2(pack_bf16x2(sums[0], sums[1]), pack_bf16x2(sums[2], sums[3]));
    return;
  }
  *reinterpret_cast<uint2*>(y + row * Config::kHidden + column) =
      make_uint2(pack_bf16x2(low.x + first.x, low.y + first.y),
                 pack_bf16x2(high.x + second.x, high.y + second.y));
}
