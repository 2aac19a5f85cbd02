// LazyGatedDelta of prompts, third launch: the norm and the gate of the rows in chunks, in place.
//
//   rows, norm, positions, row_start, replay_count   as in kernel.cu
//   output   bf16 [T, Hv·Dv], in: the rounded outputs of apply_chunks.cu; out: normalized and gated
//
// Grid (value heads, places). For 27B and 2048 rows: reads and writes 75 MB. A warp loads all of
// its rows' elements at once.
#include "../_device/normed_rows.cuh"
#include "device/chunks.cuh"

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kWarpRows = kChunk / kWarps;
constexpr int kLaneValues = ceil_div(kValueWidth, 32);

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    norm_chunks(const uint16_t* rows, const uint16_t* norm, const int* positions,
                const int* row_start, const int* replay_count, uint16_t* output) {
  DYNAMIC_SHARED(int, shared);
  pdl_launch_dependents();
  pdl_wait();
  const int head = blockIdx.x, place = blockIdx.y;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int b = sequence_at<kThreads>(place, row_start, positions, replay_count, shared);
  if (b < 0) return;
  const ChunkedRows of(b, row_start, positions, replay_count);
  const int64_t first = of.first + (place - of.first / kChunk) * kChunk + warp * kWarpRows;
  const uint16_t* const gates =
      rows + first * Config::kRowWidth + Config::kChannels + head * kValueWidth;
  uint16_t* const outputs = output + first * kValues + head * kValueWidth;

  uint16_t mixed[kWarpRows][kLaneValues], gate[kWarpRows][kLaneValues];
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) {
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      const int at = lane + i * 32;
      const bool is_real = at < kValueWidth;
      mixed[r][i] = is_real ? load_l2_bf16(outputs + r * kValues + at) : 0;
      gate[r][i] = is_real ? load_l2_bf16(gates + r * Config::kRowWidth + at) : 0;
    }
  }
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      const float value = bf16_to_float(mixed[r][i]);
      sum = __fmaf_rn(value, value, sum);
    }
    const float scale = rsqrtf(warp_sum(sum) / kValueWidth + static_cast<float>(Config::kEps));
#pragma unroll
    for (int i = 0; i < kLaneValues; ++i) {
      const int at = lane + i * 32;
      if (at >= kValueWidth) continue;
      const float normed =
          rounded(rounded(bf16_to_float(mixed[r][i]) * scale) * bf16_to_float(norm[at]));
      outputs[r * kValues + at] = float_to_bf16(normed * silu(bf16_to_float(gate[r][i])));
    }
  }
}
