// Norm, router logits and chosen experts of 16 rows, or of 8 wide rows, by a CTA of 8 warps.
//
// For 2048 rows of GPT-OSS-20B: 128 CTAs, each with 92 KB of rows and 184 KB of router weights from
// L2, 0.4 GFLOP on mma.sync: about 6 µs.
//
// Config: kKBlocks (hidden/32), kExperts, kTopK, kSequences, kEps, kSharedBytes, kRouterRows,
// kNormRounding, kRounded (logits, as a linear layer's output is), kScored, kScores, kFactors,
// kSharedGates, kGates, kRouterNorm.
#pragma once

#include "../../_device/prefill_rows.cuh"
#include "config.cuh"
#include "expert_choice.cuh"
#include "router_logit.cuh"
#include "router_parts.cuh"

constexpr Norm kNorm = static_cast<Norm>(Config::kNormRounding);
constexpr int kRouterRows = Config::kRouterRows, kRouterRowTiles = kRouterRows / 8;
using Choice = ChoiceOf<Config>;
constexpr int kRouterWarps = kRowsThreads / 32;
constexpr int kHidden = 32 * Config::kKBlocks;
// 16-bit values between rows in shared memory: the 8 rows of a B operand start in other banks.
constexpr int kRouterStride = kHidden + 8;
// Rows of the router's weight: logits, then gates of shared experts.
constexpr int kOutputs = Choice::kLogits + Config::kSharedGates;
constexpr int kExpertTiles = ceil_div(kOutputs, 16);
constexpr int kSlices = kExpertTiles >= kRouterWarps ? 1 : kRouterWarps / kExpertTiles;
constexpr int kSliceBlocks = ceil_div(Config::kKBlocks, kSlices);
// Blocks of router weights in flight. The choice of many experts needs registers too.
constexpr int kBlocksAhead = Config::kTopK > 4 ? 4 : 6;

struct RouterSums {
  float of[kSlices][kRouterRows][16 * kExpertTiles];
};
static_assert(2 * kRouterRows * kRouterStride + sizeof(RouterSums) == Config::kSharedBytes,
              "the launch gives as much as rows and sums take");

// Rows ``first`` … + 15 of x [rows, hidden], normed for the router, into shared memory; zeros from
// ``live`` on.
__device__ __forceinline__ void load_normed_rows(const uint16_t* x, const uint16_t* norm,
                                                 const float* router_norm, float eps, int first,
                                                 int live, uint16_t* rows) {
  for (int r = threadIdx.x / 32; r < kRouterRows; r += kRouterWarps) {
    const uint16_t* const row = x + static_cast<size_t>(first + r) * kHidden;
    const bool there = first + r < live;
    const float scale = there ? inverse_rms<Config::kKBlocks>(row, eps) : 0.0f;
    for (int c = threadIdx.x % 32; c < kHidden / 8; c += 32) {
      uint4 out = make_uint4(0, 0, 0, 0);
      if (there) {
        const uint4 v = reinterpret_cast<const uint4*>(row)[c];
        if constexpr (Config::kRouterNorm != 0) {
          const float4* const weights = reinterpret_cast<const float4*>(router_norm) + 2 * c;
          out = normed_by(v, weights[0], weights[1], scale);
        } else {
          const uint4 w = reinterpret_cast<const uint4*>(norm)[c];
          out =
              make_uint4(normed_pair<kNorm>(v.x, w.x, scale), normed_pair<kNorm>(v.y, w.y, scale),
                         normed_pair<kNorm>(v.z, w.z, scale), normed_pair<kNorm>(v.w, w.w, scale));
        }
      }
      *reinterpret_cast<uint4*>(rows + r * kRouterStride + 8 * c) = out;
    }
  }
}

// Multiply the rows by the weights of all experts, in slices of hidden that are summed in order.
__device__ __forceinline__ void multiply_router(const uint16_t* router_weight, const uint16_t* rows,
                                                RouterSums& sums) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int unit = threadIdx.x / 32; unit < kExpertTiles * kSlices; unit += kRouterWarps) {
    const int tile = unit % kExpertTiles, slice = unit / kExpertTiles;
    const int low = min(16 * tile + g, kOutputs - 1), high = min(16 * tile + g + 8, kOutputs - 1);
    const int end = min(Config::kKBlocks, (slice + 1) * kSliceBlocks);
    float d[kRouterRowTiles][4] = {};
    for (int first = slice * kSliceBlocks; first < end; first += kBlocksAhead) {
      uint4 a[kBlocksAhead], b[kBlocksAhead];
#pragma unroll
      for (int i = 0; i < kBlocksAhead; ++i) {
        const int column = 32 * min(first + i, end - 1) + 8 * t;
        a[i] = load_constant16(router_weight + static_cast<size_t>(low) * kHidden + column);
        b[i] = load_constant16(router_weight + static_cast<size_t>(high) * kHidden + column);
      }
#pragma unroll
      for (int i = 0; i < kBlocksAhead; ++i) {
        if (first + i >= end) break;
        const int column = 32 * (first + i) + 8 * t;
#pragma unroll
        for (int n = 0; n < kRouterRowTiles; ++n) {
          const uint4 x =
              *reinterpret_cast<const uint4*>(rows + (8 * n + g) * kRouterStride + column);
          mma_bf16(d[n], {a[i].x, b[i].x, a[i].y, b[i].y}, {x.x, x.y});
          mma_bf16(d[n], {a[i].z, b[i].z, a[i].w, b[i].w}, {x.z, x.w});
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4 * kRouterRowTiles; ++i)
      sums.of[slice][8 * (i / 4) + 2 * t + i % 2][16 * tile + g + i % 4 / 2 * 8] = d[i / 4][i % 4];
  }
}

// The body of a launch.
__device__ __forceinline__ void route(unsigned char* shared, const uint16_t* x,
                                      const uint16_t* norm, const uint16_t* router_weight,
                                      const uint16_t* router_bias, const int* row_start,
                                      const RouterParts& parts, float* logits, int* chosen,
                                      float* weights) {
  constexpr int kLogits = Choice::kLogits;
  uint16_t* const rows = reinterpret_cast<uint16_t*>(shared);
  RouterSums& sums = *reinterpret_cast<RouterSums*>(shared + 2 * kRouterRows * kRouterStride);
  pdl_launch_dependents();
  pdl_wait();
  const int live = load_l2_int(row_start + Config::kSequences);
  const int first = static_cast<int>(blockIdx.x) * kRouterRows;
  if (first >= live) return;
  load_normed_rows(x, norm, parts.router_norm, static_cast<float>(Config::kEps), first, live, rows);
  __syncthreads();
  multiply_router(router_weight, rows, sums);
  __syncthreads();
  const int count = min(kRouterRows, live - first);
  for (int i = threadIdx.x; i < count * kOutputs; i += kRowsThreads) {
    const int r = i / kOutputs, e = i % kOutputs;
    float logit = 0.0f;
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) logit += sums.of[slice][r][e];
    logit = router_logit(logit + bf16_to_float(router_bias[e]));
    const size_t at = static_cast<size_t>(first + r) * kLogits + e;
    if (Config::kSharedGates > 0 && e >= kLogits) {
      logits[Config::kGates + at - kLogits] = logit;
      continue;
    }
    if constexpr (Config::kScores > 0) {
      logits[at] = sigmoid_of(logit) + parts.choice_bias[e];
      logits[Config::kScores + at] = logit;
    } else {
      logits[at] = logit;
    }
    if constexpr (Config::kFactors > 0) logits[Config::kFactors + at] = parts.expert_scale[e];
  }
  __syncthreads();
  for (int r = threadIdx.x / 32; r < count; r += kRouterWarps) {
    const size_t row = first + r;
    choose_experts<Choice>(logits + row * kLogits, chosen + row * Config::kTopK,
                           weights + row * Config::kTopK);
  }
}
