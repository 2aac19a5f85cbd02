// Norm and router logits of 8 rows for 8 or 16 experts, by a CTA of kRouterWarps warps. Each has a
// fixed slice of HIDDEN, whose router weights it loads before it waits for x; slices are summed in
// a fixed order. Weights are in registers. With kStaged, for layers whose weights do not fit there
// next to a slice of x, they are in shared memory.
//
// Config: kRows, kSequences, kHidden, kExperts (the candidates), kRouterExperts,
// kRouterWarps, kNormRounding, kEps, kStaged, kRounded (logits, as a linear layer's output is),
// kScores, kFactors, kSharedGates, kGates, kRouterNorm.
#pragma once

#include "../../_device/bf16.cuh"
#include "../../_device/ptx.cuh"
#include "../../_device/ptx_load.cuh"
#include "config.cuh"
#include "router_logit.cuh"
#include "router_parts.cuh"
#include "scored_choice.cuh"

constexpr int kBlocks = Config::kHidden / 32;
constexpr int kSteps = ceil_div(kBlocks, Config::kRouterWarps);
// Rows of the router's weight: candidates, then gates of shared experts.
constexpr int kOutputs = Config::kExperts + Config::kSharedGates;
constexpr int kCtaExperts = Config::kRouterExperts, kHalves = kCtaExperts / 8;
constexpr int kThreads = 32 * Config::kRouterWarps;
static_assert(kCtaExperts == 8 || kCtaExperts == 16, "rows of one mma");
static_assert(8 * kCtaExperts <= kThreads, "a thread finishes a logit");
static_assert(!Config::kStaged || kHalves == 1, "staged weights are those of 8 experts");
// Slices of HIDDEN, with zeros up to a multiple of 4.
constexpr int kSlices = round_up(Config::kRouterWarps, 4);

struct SharedRouter {
  uint4 norm[Config::kRouterWarps][kSteps][4];
  float4 squares[8][kSlices / 4];
  float logits[kSlices][kCtaExperts][8];
};

// With kRouterNorm: the norm of the router's input, fp32. SharedRouter has that of the experts.
struct OwnNorm {
  float4 of[Config::kRouterWarps][kSteps][4][2];
};

__device__ __forceinline__ float4 as_floats(uint4 v) {
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z),
                     __uint_as_float(v.w));
}

__device__ __forceinline__ float sum_of_squares(uint4 v) {
  const float2 a = unpack_bf16x2(v.x), b = unpack_bf16x2(v.y);
  const float2 c = unpack_bf16x2(v.z), d = unpack_bf16x2(v.w);
  return ((a.x * a.x + a.y * a.y) + (b.x * b.x + b.y * b.y)) +
         ((c.x * c.x + c.y * c.y) + (d.x * d.x + d.y * d.y));
}

__device__ __forceinline__ uint32_t normed_pair(uint32_t x, uint32_t norm, float rate) {
  // The numbers of rms_norms.py: GPT-OSS, LLaMA, and a weight that is stored minus 1.
  const float2 value = unpack_bf16x2(x);
  float2 weight = unpack_bf16x2(norm);
  if (Config::kNormRounding == 2) weight = make_float2(1.0f + weight.x, 1.0f + weight.y);
  if (Config::kNormRounding == 1)
    return mul_bf16x2(pack_bf16x2(value.x * rate, value.y * rate), norm);
  return pack_bf16x2(value.x * rate * weight.x, value.y * rate * weight.y);
}

// The body of a launch. ``staged`` is dynamic shared memory; ``own`` is null if kRouterNorm is 0.
__device__ __forceinline__ void route(SharedRouter& shared, OwnNorm* own, uint4* staged,
                                      const uint16_t* x, const uint16_t* __restrict__ norm,
                                      const uint16_t* __restrict__ router_weight,
                                      const uint16_t* __restrict__ router_bias,
                                      const int* row_start, const RouterParts& parts,
                                      uint16_t* normed_rows, float* logits) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int first_expert = blockIdx.x * kCtaExperts, first_row = blockIdx.y * 8;
  const uint4 nothing = make_uint4(0, 0, 0, 0);
  pdl_launch_dependents();

  const int first_block = warp * kSteps, first_column = 32 * first_block + 8 * t;
  const uint16_t* const expert_weight =
      router_weight + (first_expert + g) * Config::kHidden + first_column;
  uint4 weights[Config::kStaged ? 1 : kSteps][kHalves];
  // Each lane reads only its own staged weights.
  uint4* const own_staged = staged + (warp * kSteps * 32 + lane);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const bool inside = first_block + step < kBlocks;
    if constexpr (Config::kStaged) {
      if (inside && first_expert + g < kOutputs) {
        cp_async_16(own_staged + 32 * step, expert_weight + 32 * step);
      } else {
        own_staged[32 * step] = nothing;
      }
    } else {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const bool there = inside && first_expert + 8 * half + g < kOutputs;
        weights[step][half] =
            there ? load_early16(expert_weight + 8 * half * Config::kHidden + 32 * step) : nothing;
      }
    }
    // In shared memory, because registers are scarce.
    if (inside && g == 0) {
      shared.norm[warp][step][t] = load_early16(norm + first_column + 32 * step);
      if constexpr (Config::kRouterNorm != 0) {
        const float* const at = parts.router_norm + first_column + 32 * step;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          own->of[warp][step][t][half] = as_floats(load_early16(at + 4 * half));
        }
      }
    }
  }
  if constexpr (Config::kStaged) cp_async_commit();
  // The logit that this thread finishes, if any.
  const int own_expert = first_expert + static_cast<int>(threadIdx.x) / 8;
  const int own_row = first_row + static_cast<int>(threadIdx.x) % 8;
  const bool finishes = threadIdx.x < 8 * kCtaExperts && own_expert < kOutputs;
  const bool is_gate = Config::kSharedGates > 0 && own_expert >= Config::kExperts;
  const float bias = finishes ? bf16_to_float(load_early_bf16(router_bias + own_expert)) : 0.0f;
  float of_choice = 0.0f, factor = 1.0f;
  if constexpr (Config::kScores > 0) {
    if (finishes && !is_gate)
      of_choice = __uint_as_float(load_early4(parts.choice_bias + own_expert));
  }
  if constexpr (Config::kFactors > 0) {
    if (finishes && !is_gate)
      factor = __uint_as_float(load_early4(parts.expert_scale + own_expert));
  }
  for (int i = threadIdx.x; i < 8 * kSlices; i += kThreads) {
    reinterpret_cast<float*>(shared.squares)[i] = 0.0f;
  }
  for (int i = 8 * kCtaExperts * Config::kRouterWarps + threadIdx.x; i < 8 * kCtaExperts * kSlices;
       i += kThreads) {
    reinterpret_cast<float*>(shared.logits)[i] = 0.0f;
  }
  __syncthreads();

  // Rows past the live ones are computed but not stored, because row_start is known late.
  pdl_wait();
  const int row = first_row + g, row_at = row * Config::kHidden + first_column;
  uint4 values[kSteps];
  const auto ask = [&] {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const bool there = first_block + step < kBlocks && row < Config::kRows;
      values[step] = there ? load_l2_16(x + row_at + 32 * step) : nothing;
    }
  };
  ask();
  const int live = load_l2_int(row_start + Config::kSequences);
  float squares = 0.0f;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) squares += sum_of_squares(values[step]);
  // Staged values are loaded again here: together with the squares they would need twice the
  // registers until the products.
  if constexpr (Config::kStaged) ask();
  squares += __shfl_xor_sync(~0u, squares, 1);
  squares += __shfl_xor_sync(~0u, squares, 2);
  if (t == 0) reinterpret_cast<float*>(shared.squares[g])[warp] = squares;
  __syncthreads();

  float4 total = shared.squares[g][0];
#pragma unroll
  for (int i = 1; i < kSlices / 4; ++i) {
    const float4 more = shared.squares[g][i];
    total = make_float4(total.x + more.x, total.y + more.y, total.z + more.z, total.w + more.w);
  }
  const float mean = ((total.x + total.y) + (total.z + total.w)) * (1.0f / Config::kHidden);
  const float rate = rsqrtf(mean + static_cast<float>(Config::kEps));
  if constexpr (Config::kStaged) cp_async_wait<0>();
  // Two chains of sums, which tensor cores process alternately; with 8 experts rows 8 to 15 are
  // empty.
  float sums[2][4] = {};
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (first_block + step >= kBlocks) break;
    const uint4 v = values[step], n = shared.norm[warp][step][t];
    const uint4 w =
        Config::kStaged ? own_staged[32 * step] : weights[Config::kStaged ? 0 : step][0];
    const uint4 more = kHalves == 2 ? weights[Config::kStaged ? 0 : step][kHalves - 1] : nothing;
    const uint4 normed = make_uint4(normed_pair(v.x, n.x, rate), normed_pair(v.y, n.y, rate),
                                    normed_pair(v.z, n.z, rate), normed_pair(v.w, n.w, rate));
    if (blockIdx.x == 0 && row < live) {
      *reinterpret_cast<uint4*>(normed_rows + row_at + 32 * step) = normed;
    }
    uint4 read = normed;
    if constexpr (Config::kRouterNorm != 0)
      read = normed_by(v, own->of[warp][step][t][0], own->of[warp][step][t][1], rate);
    mma_bf16(sums[0], {w.x, more.x, w.y, more.y}, {read.x, read.y});
    mma_bf16(sums[1], {w.z, more.z, w.w, more.w}, {read.z, read.w});
  }
#pragma unroll
  for (int i = 0; i < 2 * kHalves; ++i) {
    shared.logits[warp][g + i / 2 * 8][2 * t + i % 2] = sums[0][i] + sums[1][i];
  }
  __syncthreads();
  if (finishes && own_row < live) {
    float sum_of[4] = {};
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      sum_of[slice % 4] += shared.logits[slice][own_expert - first_expert][own_row - first_row];
    }
    const float logit = (sum_of[0] + sum_of[1]) + (sum_of[2] + sum_of[3]);
    const int at = own_row * Config::kExperts + own_expert;
    if (is_gate) {
      logits[Config::kGates + at - Config::kExperts] = router_logit(logit + bias);
      return;
    }
    if constexpr (Config::kScores > 0) {
      logits[at] = sigmoid_of(router_logit(logit + bias)) + of_choice;
      logits[Config::kScores + at] = router_logit(logit + bias);
    } else {
      logits[at] = router_logit(logit + bias);
    }
    if constexpr (Config::kFactors > 0) logits[Config::kFactors + at] = factor;
  }
}
