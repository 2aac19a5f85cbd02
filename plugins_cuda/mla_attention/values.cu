// MlaAttention with rebuilt keys, last launch: merges splits and sinks, and projects sums of
// latents to values.
//
//   w_v            bf16 [VALUE, V_HEADS, V_WIDTH], constant
//   b_v            bf16 [V_HEADS, V_WIDTH], constant; null without HAS_BIAS
//   row_start      i32  [BATCH + 1]
//   row_slot       i32  [T]
//   sinks          f32  [Q_HEADS], null without HAS_SINKS
//   attended       bf16 [T, Q_HEADS, V_WIDTH], out
//   workspace_sums      f32 [T, Q_HEADS, PLACES, 2]: maximum in units of log 2 (−∞: no key), sum
//   workspace_values    f32 [T, Q_HEADS, PLACES, VALUE]
//   workspace_partials  f32 [tiles, V_HEADS, PANELS, 16, V_WIDTH]
//   workspace_arrivals  i32 [tiles, V_HEADS], zeros before and after
//
// Grid (PANELS, V_HEADS, tiles of 16 rows of the product). A row of the product is a row of the
// launch and one of the query heads that share the value head. A CTA merges 64 columns of 16 rows.
// Place p belongs to group p mod GROUPS; the places of a group are merged in order, then the
// groups. The CTA multiplies the result by its panel of w_v. The last of the PANELS to arrive adds
// the products in order, and the bias times the sum of the weights.
#include "../_device/attention_tile.cuh"
#include "device/config.cuh"
#include "device/latent_mass.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kShared = Config::kQHeads / Config::kVHeads;  // query heads of a value head
constexpr int kRows = 16;
constexpr int kQuads = 16;  // of columns
constexpr int kWidthUnits = Config::kVWidth / 8;
constexpr int kParts = Config::kVWidth / 16;
constexpr int kWarpParts = ceil_div(kParts, kWarps);
constexpr int kGroupPlaces = ceil_div(Config::kPlaces, Config::kGroups);
// Rows whose places are merged at once: a thread has at most one group of one of them.
constexpr int kPassRows = Config::kGroups > 8   ? 1
                          : Config::kGroups > 4 ? 2
                          : Config::kGroups > 2 ? 4
                          : Config::kGroups > 1 ? 8
                                                : 16;
static_assert(kPassRows * kQuads * Config::kGroups <= kThreads, "see above");

// Row ``row`` of this CTA's 16 as (row of the launch, query head); −1 past the launch's rows.
__device__ __forceinline__ int64_t place_of(int row, int rows) {
  const int at = static_cast<int>(blockIdx.z) * kRows + row;
  if (at / kShared >= rows) return -1;
  return static_cast<int64_t>(at / kShared) * Config::kQHeads + blockIdx.y * kShared + at % kShared;
}

// Merge four columns of the first ``places`` of a group, in order.
__device__ __forceinline__ Part joined(int64_t row, int column, int group, int places,
                                       const float2* sums, const float* values) {
  Part part[kGroupPlaces];
#pragma unroll
  for (int i = 0; i < kGroupPlaces; ++i) {
    const int place = group + i * Config::kGroups;
    part[i] = empty_part();
    if (place >= Config::kPlaces || place >= places) continue;
    const float2 pair = load_l2_float2(sums + row * Config::kPlaces + place);
    part[i].maximum = pair.x;
    part[i].sum = pair.y;
    if (column >= Config::kValue) continue;
    const uint4 bits =
        load_l2_16(values + (row * Config::kPlaces + place) * Config::kValue + column);
    part[i].values = make_float4(__uint_as_float(bits.x), __uint_as_float(bits.y),
                                 __uint_as_float(bits.z), __uint_as_float(bits.w));
  }
  Part whole = empty_part();
#pragma unroll
  for (int i = 0; i < kGroupPlaces; ++i) join(whole, part[i]);
  return whole;
}

// Return the places of a row that may hold a state. Without a window, tiles are assigned to splits
// from the start of the context, so those after the last tile have none.
__device__ __forceinline__ int places_of(int64_t row, const int* row_slot) {
  return Config::kWindow > 0 ? Config::kPlaces : row_slot[row] / Config::kTile + 1;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    project_values(const uint4* w_v, const uint16_t* b_v, const int* row_start, const int* row_slot,
                   const float* sinks, uint16_t* attended, const float2* workspace_sums,
                   const float* workspace_values, float* workspace_partials,
                   int* workspace_arrivals) {
  __shared__ uint4 mixed[kRows * 8];          // [16][64] bf16
  __shared__ uint4 weight[64 * kWidthUnits];  // [64][V_WIDTH] bf16
  __shared__ float4 group_values[Config::kGroups][kPassRows * kQuads];
  __shared__ float2 group_sums[Config::kGroups][kPassRows * kQuads];
  __shared__ float mass[kRows];
  __shared__ bool is_last;
  const int panel = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  pdl_launch_dependents();
  for (int i = threadIdx.x; i < 64 * kWidthUnits; i += kThreads) {
    const int k = panel * 64 + i / kWidthUnits, unit = i % kWidthUnits;
    const int64_t row = min(k, Config::kValue - 1);
    cp_async_16_or_zero(weight + tile_unit<Config::kVWidth>(i / kWidthUnits, unit),
                        w_v + (row * Config::kVHeads + blockIdx.y) * kWidthUnits + unit,
                        k < Config::kValue);
  }
  cp_async_commit();
  pdl_wait();
  const int rows = row_start[Config::kBatch];
  if (place_of(0, rows) < 0) {
    cp_async_wait<0>();
    return;
  }
  for (int i = threadIdx.x; i < kRows * kQuads; i += kThreads) {
    reinterpret_cast<uint2*>(mixed + tile_unit<64>(i / kQuads, i % kQuads / 2))[i % 2] =
        make_uint2(0u, 0u);
  }
  // A thread merges one group of one row's quad; then the groups are merged.
  const int item = threadIdx.x % (kPassRows * kQuads), quad = item % kQuads;
  const int group = threadIdx.x / (kPassRows * kQuads);
#pragma unroll 1
  for (int first = 0; first < kRows && place_of(first, rows) >= 0; first += kPassRows) {
    const int row = first + item / kQuads;
    const int64_t place = place_of(row, rows);
    if (place >= 0 && group < Config::kGroups) {
      const Part part =
          joined(place, panel * 64 + 4 * quad, group, places_of(place / Config::kQHeads, row_slot),
                 workspace_sums, workspace_values);
      group_values[group][item] = part.values;
      group_sums[group][item] = make_float2(part.maximum, part.sum);
    }
    __syncthreads();
    if (place >= 0 && group == 0) {
      Part all = empty_part();
#pragma unroll
      for (int i = 0; i < Config::kGroups; ++i) {
        const float2 pair = group_sums[i][item];
        join(all, {pair.x, pair.y, group_values[i][item]});
      }
      const int head = static_cast<int>(place % Config::kQHeads);
      if (quad == 0) mass[row] = mass_of(all, sinks, head);
      if (Config::kHasSinks) join_sink(all, sinks[head]);
      reinterpret_cast<uint2*>(mixed + tile_unit<64>(row, quad / 2))[quad % 2] = mean_of(all);
    }
    __syncthreads();
  }
  cp_async_wait<0>();
  __syncthreads();
  float sums[kWarpParts][2][4] = {};
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    uint32_t a[4];
    ldmatrix_x4(a, mixed + tile_unit<64>(lane % 16, 2 * step + lane / 16));
#pragma unroll
    for (int i = 0; i < kWarpParts; ++i) {
      const int part = i * kWarps + warp;
      if (part >= kParts) continue;
      uint32_t low[2], high[2];
      load_value_columns<Config::kVWidth>(low, high, weight, 16 * step, part);
      mma_bf16(sums[i][0], a, low);
      mma_bf16(sums[i][1], a, high);
    }
  }
  const int64_t tile = static_cast<int64_t>(blockIdx.z) * Config::kVHeads + blockIdx.y;
  float* partials = workspace_partials + tile * Config::kPanels * kRows * Config::kVWidth;
#pragma unroll
  for (int i = 0; i < kWarpParts; ++i) {
    const int part = i * kWarps + warp;
    if (part >= kParts) continue;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = lane / 4 + j / 2 * 8;
      float* to = partials + (panel * kRows + row) * Config::kVWidth + 16 * part + 2 * (lane % 4);
      *reinterpret_cast<float2*>(to + j % 2 * 8) =
          make_float2(sums[i][j % 2][j / 2 * 2], sums[i][j % 2][j / 2 * 2 + 1]);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_last =
        Config::kPanels == 1 || atomicAdd(workspace_arrivals + tile, 1) == Config::kPanels - 1;
    if (is_last && Config::kPanels > 1) workspace_arrivals[tile] = 0;
    __threadfence();
  }
  __syncthreads();
  if (!is_last) return;
  for (int i = threadIdx.x; i < kRows * Config::kVWidth; i += kThreads) {
    const int row = i / Config::kVWidth, column = i % Config::kVWidth;
    const int64_t place = place_of(row, rows);
    if (place < 0) continue;
    float sum = 0.0f;
#pragma unroll
    for (int from = 0; from < Config::kPanels; ++from) {
      sum += load_l2_float(partials + from * kRows * Config::kVWidth + i);
    }
    if (Config::kHasBias) {
      sum = __fmaf_rn(mass[row], bf16_to_float(b_v[blockIdx.y * Config::kVWidth + column]), sum);
    }
    attended[place * Config::kVWidth + column] = float_to_bf16(sum);
  }
}
