// Writes rows [T, K] as panels (prefill_panel.cuh), with or without RMS norm, one warp per row.
//
// For 2048 rows of 2880, 12 MB are read (the second read hits L1) and 12 MB written, all in L2.
// That takes about 5 µs before a GEMM of 80 µs. ``blocks`` is K/32.
#pragma once

#include "bf16.cuh"
#include "prefill_panel.cuh"
#include "ptx.cuh"

constexpr int kRowsThreads = 256;

// The numbers of rms_norms.py. kGptOss: multiply by the weight in fp32, then round. kLlama: round
// before, too. kOffset: as kGptOss, by 1 + the weight. kNone: no norm.
enum class Norm { kGptOss, kLlama, kOffset, kNone };

// Return 1 / rms of a row of K values, in every lane of the warp.
template <int blocks>
__device__ __forceinline__ float inverse_rms(const uint16_t* row, float eps) {
  const int lane = threadIdx.x % 32;
  float sum = 0.0f;
  // Unrolled, so that all loads of the row are in flight together.
#pragma unroll
  for (int i = 0; i < ceil_div(4 * blocks, 32); ++i) {
    const int c = 32 * i + lane;
    if (c >= 4 * blocks) break;
    const uint4 v = *reinterpret_cast<const uint4*>(row + 8 * c);
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const float2 pair = unpack_bf16x2(words[word]);
      sum = fmaf(pair.x, pair.x, sum);
      sum = fmaf(pair.y, pair.y, sum);
    }
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(kAllLanes, sum, mask);
  return rsqrtf(sum / (32 * blocks) + eps);
}

template <Norm norm>
__device__ __forceinline__ uint32_t normed_pair(uint32_t x, uint32_t weight, float scale) {
  if constexpr (norm == Norm::kNone) return x;
  const float2 value = unpack_bf16x2(x);
  float2 factor = unpack_bf16x2(weight);
  if constexpr (norm == Norm::kOffset) factor = make_float2(1.0f + factor.x, 1.0f + factor.y);
  float low = value.x * scale, high = value.y * scale;
  if constexpr (norm == Norm::kLlama) {
    low = bf16_to_float(float_to_bf16(low));
    high = bf16_to_float(float_to_bf16(high));
  }
  return pack_bf16x2(low * factor.x, high * factor.y);
}

// Return chunk ``chunk`` of panel ``panel`` of a row; zeros beyond K.
template <int blocks, Norm norm>
__device__ __forceinline__ uint4 row_chunk(const uint16_t* row, const uint16_t* weight, float scale,
                                           int panel, int chunk) {
  if (blocks % 2 != 0 && 2 * panel + chunk / 4 >= blocks) return make_uint4(0, 0, 0, 0);
  const uint32_t* const words = reinterpret_cast<const uint32_t*>(row + kPanelColumns * panel);
  const uint32_t* const factors = reinterpret_cast<const uint32_t*>(weight + kPanelColumns * panel);
  const auto word = [&](int i) {
    return normed_pair<norm>(words[i], norm == Norm::kNone ? 0 : factors[i], scale);
  };
  return panel_chunk_of(word, chunk);
}

// Write rows blockIdx.x · 8 … + 7 of ``x`` [rows, K] to ``panels`` of ``panel_rows`` rows.
template <int blocks, Norm norm>
__device__ __forceinline__ void write_panel_rows(const uint16_t* x, const uint16_t* weight,
                                                 float eps, unsigned char* panels, int rows,
                                                 int panel_rows) {
  pdl_launch_dependents();
  pdl_wait();
  const int row = static_cast<int>(blockIdx.x) * (kRowsThreads / 32) + threadIdx.x / 32;
  if (row >= rows) return;
  const uint16_t* const values = x + static_cast<size_t>(row) * (32 * blocks);
  const float scale = norm == Norm::kNone ? 1.0f : inverse_rms<blocks>(values, eps);
  // Loads come before stores: the compiler cannot move them, because the pointers may alias.
  constexpr int kChunks = 8 * ceil_div(blocks, 2), kAtOnce = 4;
#pragma unroll 1
  for (int first = threadIdx.x % 32; first < kChunks; first += 32 * kAtOnce) {
    uint4 held[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int c = first + 32 * i;
      if (c < kChunks) held[i] = row_chunk<blocks, norm>(values, weight, scale, c / 8, c % 8);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int c = first + 32 * i;
      if (c >= kChunks) break;
      *reinterpret_cast<uint4*>(panels + panel_chunk(c / 8, c % 8, row, panel_rows)) = held[i];
    }
  }
}
