// RmsMoe, second launch: gate and up of all chosen experts, and their activation.
//
//   gate_up           [EXPERTS, INNER / 8, tile bytes] u8, in, constant: see packing.py; with BF16
//                     [EXPERTS, INNER / 8, 16 · HIDDEN] bf16
//   gate_up_bias      [EXPERTS, 2 · INNER] bf16, in, constant: per tile 8 gates, then their 8 ups
//   row_start         [SEQUENCES + 1] i32, in
//   workspace_normed  [ROWS, HIDDEN] bf16, in
//   workspace_logits  [ROWS, EXPERTS] f32, in: of the live rows
//   workspace_h       [ROWS, TOP_K, INNER] bf16, out, for the routed rows
//
// A tile is 8 gate rows and their up rows × HIDDEN; a unit is (item, TILES neighbouring tiles) for
// up to PASS_ROWS rows of one expert. One warp streams a unit (24.6 kB per tile at 2880) and sums
// in a fixed order, so the results of a row depend neither on other rows nor on TILES. A CTA takes
// a run of neighbouring units, divided between its warps. One row of GPT-OSS: 4 · 360 tiles on 132
// CTAs, 10.9 each, 35.4 MB or 7.8 µs at 4.53 TB/s, compared to 5 µs of issue slots (36 instructions
// per step of 512 weights). Sharing a unit's K between warps is no faster here, because the chain
// of launch, routing and first bytes limits the time.
//
// If ranks share the inner width of experts, a rank has too few tiles for that: half of GPT-OSS has
// 5.5 per CTA, so some CTAs have 6 and most warps none. SLICES warps then share a unit's K, and the
// first of them adds the sums in the order of K. SLICES depends only on ranks and HIDDEN.
//
// For 64 rows of 20B: 87 tiles per CTA, of at most 2 experts, with 8 or up to 16 rows each. Here
// the warps' instructions matter: the weights alone take 73 µs, decoding and products of 20 warps
// alone take 67 (16 of a step's 36 instructions are logic of half rate), both together 86. CTAs of
// experts with more than 8 rows took 81 and others 68, so units are divided by cost.
#include "device/config.cuh"
#include "device/expert_routing.cuh"
#include "device/expert_rows.cuh"
#include "device/expert_stream.cuh"
#include "device/gated.cuh"

constexpr int kBlocks = Config::kHidden / 32;
constexpr int kExpertTiles = Config::kInner / 8, kUnits = kExpertTiles / Config::kTiles;
static_assert(kExpertTiles % Config::kTiles == 0, "a unit is of whole tiles of one item");
// An item's entries are of different rows.
constexpr int kItemRows = Config::kPassRows < Config::kRows ? Config::kPassRows : Config::kRows;

using Routed = RoutedRows<Config>;
constexpr int kMaxOf8 = ceil_div(kItemRows, 8);

struct TileOf {
  const unsigned char* gate_up;
  const RoutedItem* items;
  __device__ __forceinline__ const unsigned char* operator()(int unit) const;
};
// The warps of a team share a unit.
constexpr int kSlices = Config::kSlices, kTeams = Config::kWarps / kSlices;
static_assert(kTeams * kSlices == Config::kWarps && (kSlices == 1 || kTeams < 16),
              "a team has a named barrier");
using Stream = TileStream<Config, kBlocks, TileOf, kSlices>;

__device__ __forceinline__ const unsigned char* TileOf::operator()(int unit) const {
  const int tile = items[unit / kUnits].expert * kExpertTiles + unit % kUnits * Config::kTiles;
  return gate_up + static_cast<int64_t>(tile) * Stream::Cut::kTileBytes;
}

// Sums over slices of K: those of each lane of a team's warps, except the first warp.
struct SliceSums {
  float4 of[kTeams][kSlices > 1 ? kSlices - 1 : 1][Config::kTiles * kMaxOf8][32];
};

// Add the slices' sums in order, in the first warp of a team; return whether this warp is the
// first.
template <int columns_of_8>
__device__ __forceinline__ bool add_slices(SliceSums& slices,
                                           float (&sums)[Config::kTiles][columns_of_8][2][4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int team = warp / kSlices, slice = warp % kSlices;
#pragma unroll
  for (int i = 0; i < Config::kTiles; ++i) {
#pragma unroll
    for (int n = 0; n < columns_of_8; ++n) {
      float (&sum)[2][4] = sums[i][n];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        sum[0][c] += sum[1][c];
        sum[1][c] = 0.0f;
      }
      if (slice > 0) {
        slices.of[team][slice - 1][i * columns_of_8 + n][lane] =
            make_float4(sum[0][0], sum[0][1], sum[0][2], sum[0][3]);
      }
    }
  }
  named_barrier_sync(1 + team, 32 * kSlices);
  if (slice == 0) {
#pragma unroll
    for (int other = 0; other < kSlices - 1; ++other) {
#pragma unroll
      for (int i = 0; i < Config::kTiles; ++i) {
#pragma unroll
        for (int n = 0; n < columns_of_8; ++n) {
          const float4 more = slices.of[team][other][i * columns_of_8 + n][lane];
          float (&sum)[4] = sums[i][n][0];
          sum[0] += more.x;
          sum[1] += more.y;
          sum[2] += more.z;
          sum[3] += more.w;
        }
      }
    }
  }
  // The sums of the next unit overwrite those that have been read.
  named_barrier_sync(1 + team, 32 * kSlices);
  return slice == 0;
}

// Process one unit whose item has at most 8 · columns_of_8 entries and whose first tile is
// ``tile``; ``row_of(i)`` is entry i's row in shared memory.
template <int columns_of_8, class RowOf>
__device__ __forceinline__ void run_unit(Stream& stream, SliceSums* slices, RoutedItem item,
                                         const int* entries, int tile, const uint16_t* bias,
                                         uint16_t* h, RowOf&& row_of) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int last = item.entries - 1;
  const uint16_t* unit_bias = bias + (item.expert * kExpertTiles + tile) * 16 + g;
  // Widening them here would stall the warp, so they are widened when they are used.
  uint16_t biases[Config::kTiles][2];
#pragma unroll
  for (int i = 0; i < Config::kTiles; ++i) {
    biases[i][0] = unit_bias[16 * i];
    biases[i][1] = unit_bias[16 * i + 8];
  }
  const unsigned char* columns[columns_of_8];
#pragma unroll
  for (int n = 0; n < columns_of_8; ++n) {
    const int column = 8 * n + g;
    columns[n] = row_of(column < last ? column : last) + 16 * t;
  }
  // Two chains of sums per column, which the tensor cores work on in turn.
  float sums[Config::kTiles][columns_of_8][2][4] = {};
  stream.group([&](int step, const StepOperands(&operands)[Config::kTiles]) {
#pragma unroll
    for (int n = 0; n < columns_of_8; ++n) {
      const uint4 v = *reinterpret_cast<const uint4*>(columns[n] + 64 * step);
#pragma unroll
      for (int i = 0; i < Config::kTiles; ++i) {
        mma_bf16(sums[i][n][0], operands[i].low, {v.x, v.y});
        mma_bf16(sums[i][n][1], operands[i].high, {v.z, v.w});
      }
    }
  });
  if constexpr (kSlices > 1) {
    if (!add_slices(*slices, sums)) return;
  }
#pragma unroll
  for (int n = 0; n < columns_of_8; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = 8 * n + 2 * t + c;
      if (column > last) continue;
      uint16_t* const to = h + entries[column] * Config::kInner + 8 * tile + g;
#pragma unroll
      for (int i = 0; i < Config::kTiles; ++i) {
        const float (&sum)[2][4] = sums[i][n];
        const float gate = sum[0][c] + sum[1][c] + bf16_to_float(biases[i][0]);
        const float up = sum[0][c + 2] + sum[1][c + 2] + bf16_to_float(biases[i][1]);
        to[8 * i] = float_to_bf16(gated(gate, up));
      }
    }
  }
}

// The layout of memory.py.
constexpr int kSliceBytes = kSlices > 1 ? static_cast<int>(sizeof(SliceSums)) : 0;
static_assert(sizeof(Routed) + Config::kWarps * sizeof(Stream::Barriers) + kSliceBytes <=
                  Config::kStaticBytes,
              "static shared memory");
static_assert(Config::kWarps * Stream::kRingBytes +
                      Config::kPlaces * kActivationRowBytes<Config::kHidden> <=
                  Config::kSharedBytes,
              "rings, then rows");

extern "C" __global__ void __launch_bounds__(32 * Config::kWarps, 1)
    gate_up_experts(const unsigned char* __restrict__ gate_up,
                    const uint16_t* __restrict__ gate_up_bias, const int* row_start,
                    const uint16_t* workspace_normed, const float* workspace_logits,
                    uint16_t* workspace_h) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ Routed routing;
  __shared__ Stream::Barriers full[Config::kWarps];
  SliceSums* slices = nullptr;
  if constexpr (kSlices > 1) {
    __shared__ SliceSums of_slices;
    slices = &of_slices;
  }
  const int warp = threadIdx.x / 32;
  unsigned char* const rows = shared + Config::kWarps * Stream::kRingBytes;
  Stream stream(shared + warp * Stream::kRingBytes, full[warp], TileOf{gate_up, routing.items});
  stream.init();
  routing.clear();

  // The next launch starts only when the router's results are final, so that it can use them.
  pdl_wait();
  pdl_launch_dependents();
  auto asked = routing.ask(workspace_logits, row_start + Config::kSequences);
  if constexpr (Config::kRowsResident) {
    copy_rows<Config::kHidden>(rows, Config::kRows,
                               [&](int row) { return workspace_normed + row * Config::kHidden; });
  }
  routing.read(asked, workspace_logits, nullptr);
  const int cta = blockIdx.x;
  const int first = routing.first_unit<kUnits, Config::kCtas>(cta);
  const int end = routing.first_unit<kUnits, Config::kCtas>(cta + 1);
  stream.start(first + warp / kSlices, end, kTeams);
  if constexpr (Config::kRowsResident) {
    cp_async_wait<0>();
    __syncthreads();
  }

  const auto gather = [&](int first_entry, int count) {
    const int* entries = routing.entries + first_entry;
    copy_rows<Config::kHidden>(rows, count, [&](int i) {
      return workspace_normed + entries[i] / Config::kTopK * Config::kHidden;
    });
  };
  run_units<Config, kUnits, kSlices>(routing.items, first, end, gather, [&](int unit, int place) {
    const RoutedItem item = routing.items[unit / kUnits];
    const int* entries = routing.entries + item.first_entry;
    const int tile = unit % kUnits * Config::kTiles;
    const auto row_of = [&](int i) -> const unsigned char* {
      const int row =
          Config::kRowsResident ? entries[i] / Config::kTopK : item.first_entry + place + i;
      return rows + row * kActivationRowBytes<Config::kHidden>;
    };
    if (kMaxOf8 == 1 || item.entries <= 8) {
      run_unit<1>(stream, slices, item, entries, tile, gate_up_bias, workspace_h, row_of);
    } else {
      run_unit<kMaxOf8>(stream, slices, item, entries, tile, gate_up_bias, workspace_h, row_of);
    }
  });
}
