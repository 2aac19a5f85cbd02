// A selection of experts by bf16 logits, the output of a linear layer: the top_k largest, weighted
// by a softmax over them (GPT-OSS, Qwen3-MoE). See ChoiceOf in expert_choice.cuh.
#pragma once

#include "../../_device/bf16.cuh"
#include "../../_device/ptx.cuh"
#include "../../_device/ptx_routing.cuh"
#include "../../_device/types.cuh"

// Order a bf16 logit and an expert's id as one number; the greatest is selected first. Ties go to
// the lower id, −0 equals +0, and NaN comes first. The number is never 0.
__device__ __forceinline__ uint32_t routing_key(float logit, int expert) {
  const uint32_t bits = __float_as_uint(logit + 0.0f) >> 16;
  const uint32_t ordered = bits & 0x8000u ? ~bits & 0xFFFFu : bits | 0x8000u;
  return ordered << 16 | (0xFFFFu - static_cast<uint32_t>(expert));
}

__device__ __forceinline__ int key_expert(uint32_t key) {
  return static_cast<int>(0xFFFFu - (key & 0xFFFFu));
}

__device__ __forceinline__ float key_logit(uint32_t key) {
  const uint32_t ordered = key >> 16;
  const uint32_t bits = ordered & 0x8000u ? ordered & 0x7FFFu : ~ordered & 0xFFFFu;
  return __uint_as_float(bits << 16);
}

// C: kExperts, kTopK.
template <class C>
struct RoundedChoice {
  static constexpr int kLogits = C::kExperts, kSets = ceil_div(C::kExperts, 32);

  // A lane's part of a row: keys of the experts lane, lane + 32, …; 0 after they were selected.
  struct Row {
    uint32_t keys[kSets];
    __device__ __forceinline__ bool taken(int i) const {
      return keys[i] == 0u;
    }
  };

  struct Best {
    uint32_t keys[C::kTopK];
    __device__ __forceinline__ int expert(int k) const {
      return key_expert(keys[k]);
    }
    __device__ __forceinline__ void take(bool other, const Best& from) {
#pragma unroll
      for (int k = 0; k < C::kTopK; ++k) keys[k] = other ? from.keys[k] : keys[k];
    }
  };

  // One warp; other CTAs wrote ``logits`` [experts] fp32.
  static __device__ __forceinline__ Row read(const float* logits) {
    Row row;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kSets; ++i) {
      const int expert = lane + 32 * i;
      const bool there = expert < C::kExperts;
      row.keys[i] = there ? routing_key(load_l2_float(logits + expert), expert) : 0u;
    }
    return row;
  }

  // One warp selects the greatest keys of each of several rows, in falling order.
  template <int count>
  static __device__ __forceinline__ void choose(Row (&rows)[count], Best (&best)[count], bool) {
#pragma unroll
    for (int k = 0; k < C::kTopK; ++k) {
      // Rows are interleaved, because the maxima of one row depend on each other.
#pragma unroll
      for (int r = 0; r < count; ++r) {
        uint32_t mine = rows[r].keys[0];
#pragma unroll
        for (const uint32_t key : rows[r].keys) mine = key > mine ? key : mine;
        best[r].keys[k] = warp_max(mine);
#pragma unroll
        for (uint32_t& key : rows[r].keys) key = key == best[r].keys[k] ? 0u : key;
      }
    }
  }

  // One lane writes the selected experts by ascending id (unless null), and their weights.
  static __device__ __forceinline__ void store(const Best& best, const float*, int* chosen,
                                               float* weights) {
    float shares[C::kTopK], total = 0.0f;
#pragma unroll
    for (int k = 0; k < C::kTopK; ++k) {
      shares[k] = expf(key_logit(best.keys[k]) - key_logit(best.keys[0]));
      total += shares[k];
    }
#pragma unroll
    for (int k = 0; k < C::kTopK; ++k) {
      int place = 0;
#pragma unroll
      for (int j = 0; j < C::kTopK; ++j) place += best.expert(j) < best.expert(k);
      if (chosen != nullptr) chosen[place] = best.expert(k);
      weights[place] = shares[k] / total;
    }
  }
};
