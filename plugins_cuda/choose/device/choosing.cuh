// The bodies of Choose's launches: a summary of a row's logits, and its best noisy logit.
#pragma once

#include "../../_device/block_max.cuh"
#include "../../_device/philox.cuh"
#include "tail_cut.cuh"

constexpr int kThreads = kEdgeThreads, kWarps = kEdgeWarps;
// The upper bound of the noise is −log(−log(1 − 2⁻²⁴)) = 16.64.
constexpr float kMaxNoise = 16.7f;

// The largest logit (lowest token on ties) and log Σ exp of all; every warp computes it.
struct Summary {
  uint64_t best = 0;
  float log_total;

  __device__ __forceinline__ Summary(const uint64_t* part_best, const float* part_sums, int parts) {
    const int lane = threadIdx.x % 32;
    for (int part = lane; part < parts; part += 32) {
      const uint64_t other = load_l2_word(part_best + part);
      best = other > best ? other : best;
    }
    best = warp_max(best);
    float total = 0.0f;
    for (int part = lane; part < parts; part += 32) {
      const float maximum = ranked_value(load_l2_word(part_best + part));
      if (maximum == minus_infinity()) continue;
      total += load_l2_float(part_sums + part) * exp2_fast((maximum - ranked_value(best)) * kLog2E);
    }
    for (int distance = 16; distance > 0; distance /= 2) {
      total += __shfl_xor_sync(kAllLanes, total, distance);
    }
    log_total = ranked_value(best) + logf(total);
  }
};

// Whether this CTA is the last of a row's parts; the results of the others are then visible.
__device__ __forceinline__ bool is_last_part(unsigned* arrived) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(arrived, 1u) == gridDim.x - 1;
    if (is_last) *arrived = 0;
    __threadfence();
  }
  __syncthreads();
  return is_last;
}

// One CTA per part, grid (parts, R): the part's largest logit and its sum of exponentials.
__device__ __forceinline__ void summarise_part(const float* logits, uint64_t* workspace_best,
                                               float* workspace_sums, int vocab) {
  __shared__ float of_warps[kWarps];
  __shared__ uint64_t bests[kWarps];
  const Row row = Row(logits + static_cast<int64_t>(blockIdx.y) * vocab, vocab).part(blockIdx.x);
  float maximum = minus_infinity(), sum = 0.0f;
  int token = 4 * row.begin;
  row.each_group([&](int group, const float (&x)[4]) {
    const float highest = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
    if (highest > maximum) {
      sum *= exp2_fast((maximum - highest) * kLog2E);
      maximum = highest;
      token = 4 * group + (x[0] == maximum ? 0 : x[1] == maximum ? 1 : x[2] == maximum ? 2 : 3);
    }
    if (maximum == minus_infinity()) return;
    const float shift = maximum * kLog2E;
#pragma unroll
    for (int c = 0; c < 4; ++c) sum += exp2_fast(__fmaf_rn(x[c], kLog2E, -shift));
  });
  const uint64_t best = block_max(ranked_key(ordered_key(maximum), token), bests);
  if (maximum != minus_infinity()) sum *= exp2_fast((maximum - ranked_value(best)) * kLog2E);
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, distance);
  }
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  float total = 0.0f;
  for (int warp = 0; warp < kWarps; ++warp) total += of_warps[warp];
  workspace_best[blockIdx.y * gridDim.x + blockIdx.x] = best;
  workspace_sums[blockIdx.y * gridDim.x + blockIdx.x] = total;
}

// With the same grid: the best noisy logit of a part; the last part of a row writes its token. The
// arguments are those of ``choose``.
__device__ __forceinline__ void choose_of_part(
    const float* logits, const float* temperature, const int* top_k, const float* top_p,
    const int* seed, const int* position, const float* floor, int* choice, float* logprob,
    const uint64_t* workspace_best, const float* workspace_sums, const int* workspace_kept,
    uint64_t* workspace_noisy, unsigned* workspace_arrived, int vocab) {
  __shared__ uint64_t of_warps[kWarps];
  const int r = blockIdx.y, parts = gridDim.x;
  const bool is_greedy = temperature[r] == 0.0f;
  if (is_greedy && blockIdx.x > 0) return;
  Row row(logits + static_cast<int64_t>(r) * vocab, vocab);
  const int64_t first = static_cast<int64_t>(r) * parts;
  const Summary summary(workspace_best + first, workspace_sums + first, parts);
  if (floor != nullptr) row.drop(ranked_value(summary.best), floor[r]);
  uint64_t best = summary.best;
  if (!is_greedy) {
    const int greedy = static_cast<int>(ranked_index(summary.best));
    const Scaled scaled(temperature[r], ranked_value(summary.best));
    Kept kept;
    if ((top_k[r] > 0 && top_k[r] < vocab) || top_p[r] < 1.0f) {
      kept.key = static_cast<uint32_t>(load_l2_int(workspace_kept + 2 * r));
      kept.last_token = load_l2_int(workspace_kept + 2 * r + 1);
    }
    // The largest logit is always a candidate; logits that are lower by more than the noise range
    // lose to it.
    const float reach = kMaxNoise - positional_gumbel(seed[r], position[r], greedy);
    best = 0;
    row.part(blockIdx.x).each_group([&](int group, const float (&x)[4]) {
      float estimate[4];
      bool all_beyond = true;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        estimate[c] = scaled.estimate(x[c]);
        all_beyond &= scaled.beyond(estimate[c], reach);
      }
      if (all_beyond) return;
      const uint4 bits = positional_bits(seed[r], position[r], group);
      const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (scaled.beyond(estimate[c], reach)) continue;
        const float value = scaled.of(x[c]);
        if (!kept(value, 4 * group + c)) continue;
        const uint64_t noisy = ranked_key(ordered_key(value + gumbel(words[c])), 4 * group + c);
        best = noisy > best ? noisy : best;
      }
    });
    best = block_max(best, of_warps);
    if (threadIdx.x == 0) workspace_noisy[first + blockIdx.x] = best;
    if (!is_last_part(workspace_arrived + gridDim.y + r)) return;
    best = 0;
    for (int part = threadIdx.x % 32; part < parts; part += 32) {
      const uint64_t noisy = load_l2_word(workspace_noisy + first + part);
      best = noisy > best ? noisy : best;
    }
    best = warp_max(best);
  }
  if (threadIdx.x == 0) {
    // A row whose logits are all NaN gets an arbitrary token.
    const uint32_t last = vocab - 1;
    const int token = static_cast<int>(min(ranked_index(best), last));
    choice[r] = token;
    logprob[r] = load_l2_float(row.logits + token) - summary.log_total;
  }
}
