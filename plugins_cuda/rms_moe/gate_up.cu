// RmsMoe, second launch: gate and up of all chosen experts, and the clamped SwiGLU.
//
//   gate_up           [EXPERTS, INNER / 8, tile bytes] u8, in, constant: see packing.py
//   gate_up_bias      [EXPERTS, 2 · INNER] bf16, in, constant: per tile 8 gates, then their 8 ups
//   row_start         [SEQUENCES + 1] i32, in
//   workspace_normed  [ROWS, HIDDEN] bf16, in
//   workspace_logits  [ROWS, EXPERTS] f32, in: for up to 32 rows, of the live ones
//   workspace_routing ints, in: for more rows; see Routing in expert_routing.cuh
//   workspace_h       [ROWS, TOP_K, INNER] bf16, out, for the routed rows
//
// A unit is (item, tile): 8 gate rows and their up rows by the whole of HIDDEN, for up to PASS_ROWS
// rows of one expert; one warp streams it (24.6 kB at 2880) and sums in a fixed order, so what a
// row gets does not depend on what else is there. A CTA takes a run of neighbouring units, its
// warps in turn. One row of GPT-OSS: 4 · 360 units on 132 CTAs, 10.9 each, 35.4 MB or 7.8 µs
// at 4.53 TB/s, against 5 µs of issue slots (36 instructions a step of 512 weights). Warps that
// share a unit's K are no quicker: it is the chain of launch, routing and first bytes that counts.
// 64 rows of 20B: 87 units a CTA, of at most 2 experts.
#include "../_device/expert_routing.cuh"
#include "../_device/expert_rows.cuh"
#include "../_device/mxfp4.cuh"

constexpr int kBlocks = HIDDEN / 32;
constexpr int kTiles = INNER / 8;
// An item's entries are of different rows.
constexpr int kPassRows = PASS_ROWS < ROWS ? PASS_ROWS : ROWS;

using Layout = Routing<ROWS, TOP_K, EXPERTS, PASS_ROWS>;
constexpr int kMostOf8 = ceil_div(kPassRows, 8);

struct TileOf {
  const unsigned char* gate_up;
  const RoutedItem* items;
  __device__ __forceinline__ const unsigned char* operator()(int unit) const;
};
using Stream = TileStream<kBlocks, RING_STAGES, TileOf>;

__device__ __forceinline__ const unsigned char* TileOf::operator()(int unit) const {
  const int tile = items[unit / kTiles].expert * kTiles + unit % kTiles;
  return gate_up + static_cast<int64_t>(tile) * Stream::Cut::kTileBytes;
}

__device__ __forceinline__ float clamped_swiglu(float gate, float up) {
  constexpr float kLimit = LIMIT, kAlphaLog2 = ALPHA * 1.4426950408889634;
  gate = fminf(gate, kLimit);
  up = fminf(fmaxf(up, -kLimit), kLimit);
  return __fdividef(gate, 1.0f + exp2_fast(-kAlphaLog2 * gate)) * (up + 1.0f);
}

// One unit whose item has at most 8 · columns_of_8 entries; ``row_of(i)`` is entry i's row in
// shared memory.
template <int columns_of_8, class RowOf>
__device__ __forceinline__ void run_unit(Stream& stream, RoutedItem item, const int* entries,
                                         int tile, const uint16_t* bias, uint16_t* h,
                                         RowOf&& row_of) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int last = item.entries - 1;
  const uint16_t* tile_bias = bias + (item.expert * kTiles + tile) * 16 + g;
  const float gate_bias = bf16_to_float(tile_bias[0]), up_bias = bf16_to_float(tile_bias[8]);
  const unsigned char* columns[columns_of_8];
#pragma unroll
  for (int n = 0; n < columns_of_8; ++n) {
    const int column = 8 * n + g;
    columns[n] = row_of(column < last ? column : last) + 16 * t;
  }
  // Two chains of sums per column, which the tensor cores work on in turn.
  float sums[columns_of_8][2][4] = {};
  stream.tile([&](int step, const uint32_t (&low)[4], const uint32_t (&high)[4]) {
#pragma unroll
    for (int n = 0; n < columns_of_8; ++n) {
      const uint4 v = *reinterpret_cast<const uint4*>(columns[n] + 64 * step);
      mma_bf16(sums[n][0], low, {v.x, v.y});
      mma_bf16(sums[n][1], high, {v.z, v.w});
    }
  });
#pragma unroll
  for (int n = 0; n < columns_of_8; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = 8 * n + 2 * t + i;
      if (column > last) continue;
      const float gate = sums[n][0][i] + sums[n][1][i] + gate_bias;
      const float up = sums[n][0][i + 2] + sums[n][1][i + 2] + up_bias;
      h[entries[column] * INNER + 8 * tile + g] = float_to_bf16(clamped_swiglu(gate, up));
    }
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
    gate_up_experts(const unsigned char* __restrict__ gate_up,
                    const uint16_t* __restrict__ gate_up_bias, const int* row_start,
                    const uint16_t* workspace_normed, const float* workspace_logits,
                    const int* workspace_routing, uint16_t* workspace_h) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ Layout::Shared routing;
  __shared__ Mbarrier full[WARPS * RING_STAGES];
  const int warp = threadIdx.x / 32;
  constexpr int kRingBytes = RING_STAGES * kStageBytes;
  unsigned char* const rows = shared + WARPS * kRingBytes;
  Stream stream(shared + warp * kRingBytes, full + warp * RING_STAGES,
                TileOf{gate_up, routing.items});
  stream.init();

  // The launch behind starts only when the router's results are final, so that it may use them.
  pdl_wait();
  pdl_launch_dependents();
  const auto asked = routing.ask(workspace_logits, row_start + SEQUENCES);
  if constexpr (ROWS_RESIDENT) {
    copy_rows<HIDDEN>(rows, ROWS, [&](int row) { return workspace_normed + row * HIDDEN; });
  }
  routing.read<false>(asked, workspace_logits, workspace_routing, nullptr, nullptr);
  const int units = routing.item_count * kTiles, ctas = gridDim.x;
  const int first = units * static_cast<int>(blockIdx.x) / ctas;
  const int end = units * (static_cast<int>(blockIdx.x) + 1) / ctas;
  stream.start(first + warp, end, WARPS);
  if constexpr (ROWS_RESIDENT) {
    cp_async_wait<0>();
    __syncthreads();
  }

  const auto gather = [&](int first_entry, int count) {
    const int* entries = routing.entries + first_entry;
    copy_rows<HIDDEN>(rows, count,
                      [&](int i) { return workspace_normed + entries[i] / TOP_K * HIDDEN; });
  };
  run_units<ROWS_RESIDENT, kTiles, WARPS, PLACES>(
      routing.items, first, end, gather, [&](int unit, int place) {
        const RoutedItem item = routing.items[unit / kTiles];
        const int* entries = routing.entries + item.first_entry;
        const int tile = unit % kTiles;
        const auto row_of = [&](int i) -> const unsigned char* {
          const int row = ROWS_RESIDENT ? entries[i] / TOP_K : item.first_entry + place + i;
          return rows + row * kActivationRowBytes<HIDDEN>;
        };
        if (kMostOf8 == 1 || item.entries <= 8) {
          run_unit<1>(stream, item, entries, tile, gate_up_bias, workspace_h, row_of);
        } else {
          run_unit<kMostOf8>(stream, item, entries, tile, gate_up_bias, workspace_h, row_of);
        }
      });
}
