// The choice of a row's experts by fp32 scores, as in DeepSeek. Scores can be sigmoids with a bias,
// only the best groups may take part, and shared experts apply to every row. The definition is
// ``route`` of plugins_cuda/moe/op.py. See ChoiceOf in expert_choice.cuh.
//
// For one row of DeepSeek-V3, a lane has 8 of 256 scores; 24 reductions over the warp compute the
// scores of groups, 8 the groups, 16 the experts. In down they run during gate/up.
#pragma once

#include "../../_device/ordered_key.cuh"
#include "../../_device/ptx.cuh"
#include "../../_device/ptx_routing.cuh"
#include "../../_device/types.cuh"

// The numbers of gatings in lowerings: choice.py.
constexpr int kSoftmaxSelected = 0, kSoftmaxTopK = 1, kSigmoid = 2, kSigmoidNorm = 3;
// Prevents a division by zero if all sigmoids vanish.
constexpr float kLeastSum = 1e-20f;
// Keys of chosen experts and of excluded ones; keys of scores are greater.
constexpr uint32_t kTakenKey = 0u, kClosedKey = 1u;

__device__ __forceinline__ uint32_t score_key(float score) {
  const uint32_t key = ordered_key(score);
  return key > kClosedKey ? key : kClosedKey + 1u;
}

__device__ __forceinline__ float sigmoid_of(float logit) {
  return 1.0f / (1.0f + expf(-logit));
}

// C: kExperts and kTopK, including the kSharedExperts of every row, which are the last; kGating,
// kScaling; kScores (the number of scores before the logits; 0: experts are selected by logits);
// kFactors (the number of values before the experts' factors; 0: there are none); kGates (the
// number of values before logits whose sigmoids are the weights of shared experts; 0: these are 1);
// kGroups, kGroupsChosen, kGroupBest (the number of a group's best scores that make up the
// group's).
template <class C>
struct ScoredChoice {
  static constexpr int kLogits = C::kExperts - C::kSharedExperts;
  static constexpr int kSets = ceil_div(C::kExperts, 32);
  static constexpr int kChosen = C::kTopK - C::kSharedExperts;
  static constexpr int kOfGroup = kLogits / C::kGroups;
  static_assert(kLogits % C::kGroups == 0 && C::kGroups <= 32, "a lane holds a group's score");
  static_assert(C::kGroupsChosen == C::kGroups || kOfGroup >= C::kGroupBest, "scores of a group");
  static_assert(kChosen <= kOfGroup * C::kGroupsChosen, "there are experts to choose");
  static_assert(C::kScores == 0 || C::kGating >= kSigmoid, "a bias belongs to sigmoids");

  // The keys that a lane holds of a row: of experts lane, lane + 32, ….
  struct Row {
    uint32_t keys[kSets];
    __device__ __forceinline__ bool taken(int i) const {
      return keys[i] == kTakenKey;
    }
  };

  // ``most`` and ``total`` are the maximum and the sum of a softmax over all experts, if used.
  struct Best {
    int experts[kChosen];
    uint32_t keys[kChosen];
    float most, total;
    __device__ __forceinline__ int expert(int k) const {
      return k < kChosen ? experts[k < kChosen ? k : 0] : kLogits + k - kChosen;
    }
    __device__ __forceinline__ void take(bool other, const Best& from) {
#pragma unroll
      for (int k = 0; k < kChosen; ++k) {
        experts[k] = other ? from.experts[k] : experts[k];
        keys[k] = other ? from.keys[k] : keys[k];
      }
      most = other ? from.most : most;
      total = other ? from.total : total;
    }
  };

  // Read the values by which a row's experts are chosen, ``logits`` [kLogits]; one warp calls it.
  static __device__ __forceinline__ Row read(const float* logits) {
    Row row;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kSets; ++i) {
      const int expert = lane + 32 * i;
      row.keys[i] = expert < kLogits ? score_key(load_l2_float(logits + expert)) : kClosedKey;
    }
    return row;
  }

  // Choose the best experts of several rows; ties go to the lower id, and one warp calls it.
  // ``weighed``: their shares will be stored too.
  template <int count>
  static __device__ __forceinline__ void choose(Row (&rows)[count], Best (&best)[count],
                                                bool weighed) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < count; ++r) {
      best[r].most = best[r].total = 0.0f;
      if (C::kGating == kSoftmaxTopK && weighed) sum_exponentials(rows[r], best[r]);
      if constexpr (C::kGroupsChosen < C::kGroups) close_groups(rows[r]);
    }
#pragma unroll
    for (int k = 0; k < kChosen; ++k) {
      // Rows are interleaved, because the maxima of one row depend on each other.
#pragma unroll
      for (int r = 0; r < count; ++r) {
        uint32_t mine = kTakenKey;
#pragma unroll
        for (const uint32_t key : rows[r].keys) mine = key > mine ? key : mine;
        best[r].keys[k] = warp_max(mine);
        best[r].experts[k] = take_lowest(rows[r], best[r].keys[k]);
      }
    }
#pragma unroll
    for (int i = kLogits / 32; i < kSets; ++i) {
      const bool shared = lane + 32 * i >= kLogits && lane + 32 * i < C::kExperts;
#pragma unroll
      for (int r = 0; r < count; ++r) rows[r].keys[i] = shared ? kTakenKey : rows[r].keys[i];
    }
  }

  // Store the chosen experts by ascending id (unless null) and their weights; one lane calls it.
  static __device__ __forceinline__ void store(const Best& best, const float* logits, int* chosen,
                                               float* weights) {
    float shares[kChosen], sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kChosen; ++k) {
      shares[k] = C::kScores > 0 ? load_l2_float(logits + C::kScores + best.experts[k])
                                 : key_value(best.keys[k]);
    }
#pragma unroll
    for (int k = 0; k < kChosen; ++k) {
      if (C::kGating >= kSigmoid) {
        shares[k] = sigmoid_of(shares[k]);
      } else {
        shares[k] =
            expf(shares[k] - (C::kGating == kSoftmaxTopK ? best.most : key_value(best.keys[0])));
      }
      sum += shares[k];
    }
    const float divisor = C::kGating == kSigmoid       ? 1.0f
                          : C::kGating == kSigmoidNorm ? sum + kLeastSum
                          : C::kGating == kSoftmaxTopK ? best.total
                                                       : sum;
#pragma unroll
    for (int k = 0; k < kChosen; ++k) {
      int place = 0;
#pragma unroll
      for (int j = 0; j < kChosen; ++j) place += best.experts[j] < best.experts[k];
      if (chosen != nullptr) chosen[place] = best.experts[k];
      const float share = static_cast<float>(C::kScaling) * (shares[k] / divisor);
      weights[place] =
          C::kFactors > 0 ? share * load_l2_float(logits + C::kFactors + best.experts[k]) : share;
    }
#pragma unroll
    for (int k = kChosen; k < C::kTopK; ++k) {
      if (chosen != nullptr) chosen[k] = best.expert(k);
      weights[k] =
          C::kGates > 0 ? sigmoid_of(load_l2_float(logits + C::kGates + k - kChosen)) : 1.0f;
    }
  }

 private:
  // Take the lowest of the experts with this key and return it.
  static __device__ __forceinline__ int take_lowest(Row& row, uint32_t key) {
    const int lane = threadIdx.x % 32;
    int lowest = C::kExperts;
#pragma unroll
    for (int i = kSets - 1; i >= 0; --i) lowest = row.keys[i] == key ? lane + 32 * i : lowest;
    lowest = warp_min(lowest);
#pragma unroll
    for (int i = 0; i < kSets; ++i) row.keys[i] = lane + 32 * i == lowest ? kTakenKey : row.keys[i];
    return lowest;
  }

  // Sum the exponentials of all scores, which are logits.
  static __device__ __forceinline__ void sum_exponentials(const Row& row, Best& best) {
    uint32_t most = kClosedKey;
#pragma unroll
    for (const uint32_t key : row.keys) most = key > most ? key : most;
    best.most = key_value(warp_max(most));
#pragma unroll
    for (const uint32_t key : row.keys)
      best.total += key > kClosedKey ? expf(key_value(key) - best.most) : 0.0f;
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2)
      best.total += __shfl_xor_sync(kAllLanes, best.total, mask);
  }

  // Exclude the experts outside the kGroupsChosen best groups; ties go to the lower group.
  static __device__ __forceinline__ void close_groups(Row& row) {
    const int lane = threadIdx.x % 32;
    // The score of this lane's group; 0 in lanes without one.
    uint32_t own = 0u;
#pragma unroll 1
    for (int group = 0; group < C::kGroups; ++group) {
      const uint32_t score = score_key(group_score(row, group));
      own = lane == group ? score : own;
    }
    uint32_t open = 0u;
#pragma unroll
    for (int n = 0; n < C::kGroupsChosen; ++n) {
      const uint32_t best = warp_max(own);
      const int group = warp_min(own == best ? lane : 32);
      open |= 1u << group;
      own = lane == group ? 0u : own;
    }
#pragma unroll
    for (int i = 0; i < kSets; ++i) {
      const int expert = lane + 32 * i;
      const bool closed = expert >= kLogits || !(open >> (expert / kOfGroup) & 1u);
      row.keys[i] = closed ? kClosedKey : row.keys[i];
    }
  }

  static __device__ __forceinline__ float group_score(const Row& row, int group) {
    const int lane = threadIdx.x % 32, first = group * kOfGroup;
    // This lane's two best keys of the group.
    uint32_t best = 0u, second = 0u;
#pragma unroll
    for (int i = 0; i < kSets; ++i) {
      const int expert = lane + 32 * i;
      const bool inside = expert >= first && expert < first + kOfGroup;
      const uint32_t key = inside ? row.keys[i] : 0u, lesser = key < best ? key : best;
      best = key > best ? key : best;
      second = lesser > second ? lesser : second;
    }
    const uint32_t most = warp_max(best);
    if constexpr (C::kGroupBest == 1) return key_value(most);
    const int owner = warp_min(best == most ? lane : 32);
    return key_value(most) + key_value(warp_max(lane == owner ? second : best));
  }
};
