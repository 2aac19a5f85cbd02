// MlaAttention with absorbed queries in prefill, last launch: projects sums of latents to values.
//
//   w_v            bf16 [VALUE, V_HEADS, V_WIDTH], constant
//   b_v            bf16 [V_HEADS, V_WIDTH], constant; null without HAS_BIAS
//   row_start      i32  [BATCH + 1]
//   sinks          f32  [Q_HEADS], null without HAS_SINKS
//   attended       bf16 [T, Q_HEADS, V_WIDTH], out
//   workspace_sums, workspace_values   see absorbed.cu; one split per row
//
// Grid (Q_HEADS, groups of PROMPT_ROWS rows, groups of COLUMNS of a value). A warp holds the
// weights of 16 columns in registers, and multiplies 16 rows at a time, whose means are in shared
// memory. A sum is accumulated over VALUE in order, so the bits of a row do not depend on other
// rows.
//
// It takes 2·VALUE·V_WIDTH operations per row and head. 2048 rows of DeepSeek-V3's 128 heads are 34
// GFLOP and 268 MB of states, 60 µs from L2 and memory.
#include "../_device/ptx.cuh"
#include "device/config.cuh"
#include "device/latent_mass.cuh"
#include "device/latent_state.cuh"

namespace {

constexpr int kThreads = 256, kTokens = 16, kWarpColumns = 16;
// All warps load states; the first ones multiply.
constexpr int kMultiplyingWarps = Config::kColumns / kWarpColumns;
constexpr int kSteps = Config::kValue / 16, kPanelSteps = 4, kPanelRows = 16 * kPanelSteps;
constexpr int kPanels = ceil_div(kSteps, kPanelSteps);
// Strides with 16 bytes of padding against bank conflicts.
constexpr int kMeanStride = Config::kValue + 8, kPanelStride = Config::kColumns + 8;
constexpr int kUnits = kTokens * kStateUnits, kOwnUnits = ceil_div(kUnits, kThreads);
static_assert(Config::kPlaces == 1 && 32 * kMultiplyingWarps <= kThreads &&
                  Config::kColumns % kWarpColumns == 0 && Config::kVWidth % Config::kColumns == 0 &&
                  Config::kValue % 16 == 0,
              "see above");

// A warp's weights, as B operands of two products of 8 columns.
struct HeldWeights {
  uint32_t of[kSteps][4];

  // The complete CTA calls it; ``panel`` is [kPanelRows][kPanelStride] in shared memory.
  __device__ __forceinline__ void load(const uint16_t* w_v, int v_head, uint16_t* panel) {
    constexpr int kRowUnits = Config::kColumns / 8;
    const int lane = threadIdx.x % 32, column = threadIdx.x / 32 * kWarpColumns;
    const int64_t first =
        static_cast<int64_t>(v_head) * Config::kVWidth + blockIdx.z * Config::kColumns;
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      for (int i = threadIdx.x; i < kPanelRows * kRowUnits; i += kThreads) {
        const int64_t k = min(p * kPanelRows + i / kRowUnits, Config::kValue - 1);
        cp_async_16(panel + i / kRowUnits * kPanelStride + i % kRowUnits * 8,
                    w_v + k * (Config::kVHeads * Config::kVWidth) + first + i % kRowUnits * 8);
      }
      cp_async_commit();
      cp_async_wait<0>();
      __syncthreads();
#pragma unroll
      for (int s = 0; s < kPanelSteps; ++s) {
        if (p * kPanelSteps + s >= kSteps || column >= Config::kColumns) break;
        ldmatrix_x4_transposed(
            of[p * kPanelSteps + s],
            panel + (16 * s + lane % 16) * kPanelStride + column + lane / 16 * 8);
      }
      __syncthreads();
    }
  }
};

// A thread's part of the states of 16 rows from ``first`` on: units of 16 bytes, with the sums of
// their rows.
struct OwnStates {
  uint4 units[kOwnUnits];
  uint4 sums[kOwnUnits];

  __device__ __forceinline__ void load(const float4* all_sums, const uint4* all_values, int first,
                                       int rows) {
#pragma unroll
    for (int i = 0; i < kOwnUnits; ++i) {
      const int index = min(static_cast<int>(threadIdx.x) + i * kThreads, kUnits - 1);
      const int row = min(first + index / kStateUnits, rows - 1);
      const int64_t place = static_cast<int64_t>(row) * Config::kQHeads + blockIdx.x;
      units[i] = load_l2_16(all_values + place * kStateUnits + index % kStateUnits);
      sums[i] = load_l2_16(all_sums + place);
    }
  }

  // Write the means, [kTokens][kMeanStride], and the part of each row's attention on values.
  __device__ __forceinline__ void write(const float* sinks, uint16_t* mean, float* mass) const {
#pragma unroll
    for (int i = 0; i < kOwnUnits; ++i) {
      const int index = threadIdx.x + i * kThreads;
      if (index >= kUnits) break;
      const int token = index / kStateUnits, unit = index % kStateUnits;
      const float factor = __uint_as_float(state_half(unit) == 0 ? sums[i].y : sums[i].w);
      const uint32_t pairs[4] = {units[i].x, units[i].y, units[i].z, units[i].w};
      Part all{__uint_as_float(sums[i].z), __uint_as_float(sums[i].x), {}};
      if (unit == 0) mass[token] = mass_of(all, sinks, blockIdx.x);
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const float2 low = unpack_f16x2(pairs[j]), high = unpack_f16x2(pairs[j + 1]);
        Part part = all;
        part.values = make_float4(low.x * factor, low.y * factor, high.x * factor, high.y * factor);
        if (Config::kHasSinks) join_sink(part, sinks[blockIdx.x]);
        const uint2 means = mean_of(part);
        uint16_t* const to = mean + token * kMeanStride + state_column(unit, j);
        if (state_column(unit, j) < Config::kValue) *reinterpret_cast<uint32_t*>(to) = means.x;
        if (state_column(unit, j + 1) < Config::kValue)
          *reinterpret_cast<uint32_t*>(to + 8) = means.y;
      }
    }
  }
};

// Store the values of 16 rows from ``first`` on, below ``end``.
__device__ __forceinline__ void leave_values(const float (&sums)[2][4], const uint16_t* b_v,
                                             const float* mass, int v_head, int first, int end,
                                             uint16_t* attended) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int column =
        blockIdx.z * Config::kColumns + threadIdx.x / 32 * kWarpColumns + 8 * n + 2 * t;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = g + 8 * half;
      if (first + token >= end) continue;
      float2 value = make_float2(sums[n][2 * half], sums[n][2 * half + 1]);
      if (Config::kHasBias) {
        const uint16_t* const bias = b_v + v_head * Config::kVWidth + column;
        value.x = __fmaf_rn(mass[token], bf16_to_float(bias[0]), value.x);
        value.y = __fmaf_rn(mass[token], bf16_to_float(bias[1]), value.y);
      }
      const int64_t place = static_cast<int64_t>(first + token) * Config::kQHeads + blockIdx.x;
      *reinterpret_cast<uint32_t*>(attended + place * Config::kVWidth + column) =
          pack_bf16x2(value.x, value.y);
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    project_prompt(const uint16_t* w_v, const uint16_t* b_v, const int* row_start,
                   const float* sinks, uint16_t* attended, const float4* workspace_sums,
                   const uint4* workspace_values, int rows) {
  __shared__ uint4 panel_units[kPanelRows * kPanelStride / 8],
      mean_units[kTokens * kMeanStride / 8];
  __shared__ float mass[kTokens];
  const int v_head = blockIdx.x / (Config::kQHeads / Config::kVHeads);
  const int lane = threadIdx.x % 32;
  pdl_launch_dependents();
  HeldWeights weights;
  weights.load(w_v, v_head, reinterpret_cast<uint16_t*>(panel_units));
  uint16_t* const mean = reinterpret_cast<uint16_t*>(mean_units);
  pdl_wait();
  const int begin = blockIdx.y * Config::kPromptRows;
  const int end = min(begin + Config::kPromptRows, row_start[Config::kBatch]);
  OwnStates states;
  states.load(workspace_sums, workspace_values, begin, rows);
#pragma unroll 1
  for (int first = begin; first < end; first += kTokens) {
    states.write(sinks, mean, mass);
    __syncthreads();
    states.load(workspace_sums, workspace_values, first + kTokens, rows);
    if (threadIdx.x < 32 * kMultiplyingWarps) {
      float sums[2][4] = {};
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        uint32_t a[4];
        ldmatrix_x4(a, mean + lane % 16 * kMeanStride + 16 * s + lane / 16 * 8);
        mma_bf16(sums[0], a, {weights.of[s][0], weights.of[s][1]});
        mma_bf16(sums[1], a, {weights.of[s][2], weights.of[s][3]});
      }
      leave_values(sums, b_v, mass, v_head, first, end, attended);
    }
    __syncthreads();
  }
}
