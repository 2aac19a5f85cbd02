// Top-k and top-p of a row without a sort.
//
// A histogram of distances to the maximum, computed by parts, gives the bucket of a cut. Radix
// passes over the values of this bucket, listed in shared memory if they fit, give the value of the
// cut, and how many tokens with that value remain.
#pragma once

#include "../../_device/l2_word.cuh"
#include "logit_row.cuh"
#include "../../_device/ordered_key.cuh"
#include "value_edge.cuh"

constexpr int kList = 6144;

// Static shared memory; the cells of the histogram and the list are elsewhere.
struct TailScratch {
  EdgeHistogram histogram;
  double weight_at[kEdgeDigits];  // mass of every bucket, relative to the unit of the first
  double total_weight;
  int listed;
};

// The tokens that top-k and top-p keep: those with larger keys, and with this key up to a token.
struct Kept {
  uint32_t key = 0;
  int last_token = 0x7FFFFFFF;

  __device__ __forceinline__ bool operator()(float scaled, int token) const {
    const uint32_t own = ordered_key(scaled);
    return own > key || (own == key && token <= last_token);
  }
};

// The removal of the tail of one row.
class TailCut {
 public:
  __device__ TailCut(const Row& row, const Scaled& scaled, TailScratch& shared, float2* list,
                     float unit)
      : row_(row), scaled_(scaled), shared_(shared), list_(list), unit_(unit) {}

  // Write counts and masses [kEdgeDigits] of the buckets of a part of the row. Bucket b is digit
  // kFarBucket − b, so that digits fall with the distance.
  __device__ void add_up(const Row& part, uint32_t* counts, uint64_t* masses) {
    EdgeHistogram& histogram = shared_.histogram;
    __syncthreads();
    histogram.clear();
    __syncthreads();
    part.each_group([&](int, const float (&x)[4]) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (scaled_.beyond(scaled_.estimate(x[c]), kFarNats)) continue;
        const float scaled = scaled_.of(x[c]);
        const int bucket = scaled_.bucket(scaled);
        if (bucket != kFarBucket) {
          histogram.add(kFarBucket - bucket, scaled_.mass(scaled, bucket, unit_));
        }
      }
    });
    __syncthreads();
    histogram.sum();
    __syncthreads();
    if (threadIdx.x < kEdgeDigits) {
      counts[threadIdx.x] = static_cast<uint32_t>(histogram.count_at[threadIdx.x]);
      masses[threadIdx.x] = histogram.mass_at[threadIdx.x];
    }
  }

  // Return the cut of a row whose ``parts`` have been added. ``top_k`` 0 and ``top_p`` 1 have no
  // effect; at least one of them has one.
  __device__ Kept find(const uint32_t* counts, const uint64_t* masses, int parts, int top_k,
                       float top_p) {
    join(counts, masses, parts);
    Kept kept;
    uint64_t target = 0, ties = 0;
    uint32_t min_key = 0;
    if (top_k > 0) {
      const Edge edge = by_count(top_k);
      kept.key = min_key = edge.key;
      target = edge.left;
      ties = edge.ties;
    }
    if (top_p < 1.0f) {
      const Edge edge = by_mass(top_p, min_key);
      const uint64_t mass = max(mass_of_key(edge.key), 1u);
      target = (edge.left + mass - 1) / mass;
      ties = edge.ties;
      kept.key = edge.key;
    }
    if (target < ties) kept.last_token = token_of_tie(kept.key, target);
    return kept;
  }

 private:
  // Add the parts. The sums are integers, so the order does not affect them.
  __device__ void join(const uint32_t* counts, const uint64_t* masses, int parts) {
    EdgeHistogram& histogram = shared_.histogram;
    __syncthreads();
    if (threadIdx.x < kEdgeDigits) {
      uint64_t count = 0, mass = 0;
#pragma unroll 4
      for (int part = 0; part < parts; ++part) {
        const int at = part * kEdgeDigits + threadIdx.x;
        count += static_cast<uint32_t>(load_l2_int(reinterpret_cast<const int*>(counts + at)));
        mass += load_l2_word(masses + at);
      }
      histogram.count_at[threadIdx.x] = count;
      histogram.mass_at[threadIdx.x] = mass;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      uint64_t near = 0;
      for (int digit = threadIdx.x; digit < kEdgeDigits; digit += 32) {
        near += digit == 0 ? 0 : histogram.count_at[digit];
      }
      for (int distance = 16; distance > 0; distance /= 2) {
        near += __shfl_xor_sync(kAllLanes, near, distance);
      }
      if (threadIdx.x == 0) histogram.count_at[0] = row_.vocab - near;
    }
    // Save the sums of the buckets, because the histogram is reused for the keys of one bucket.
    __syncthreads();
    if (threadIdx.x < kEdgeDigits) {
      count_ = histogram.count_at[threadIdx.x];
      mass_ = histogram.mass_at[threadIdx.x];
    }
  }

  // Restore the sums of the buckets, and compute their relative weights.
  __device__ void weigh_buckets() {
    __syncthreads();
    if (threadIdx.x < kEdgeDigits) {
      const int digit = threadIdx.x;
      shared_.histogram.count_at[digit] = count_;
      shared_.histogram.mass_at[digit] = mass_;
      shared_.weight_at[digit] = static_cast<double>(mass_) * bucket_scale(digit);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      double total = 0.0;
      for (int digit = threadIdx.x; digit < kEdgeDigits; digit += 32) {
        total += shared_.weight_at[digit];
      }
      for (int distance = 16; distance > 0; distance /= 2) {
        total += __shfl_xor_sync(kAllLanes, total, distance);
      }
      if (threadIdx.x == 0) shared_.total_weight = total;
    }
    __syncthreads();
  }

  __device__ static double bucket_scale(int digit) {
    return exp((digit - kFarBucket) / static_cast<double>(kBucketsPerNat));
  }

  __device__ Edge by_count(int top_k) {
    EdgeHistogram& histogram = shared_.histogram;
    const Crossing at =
        histogram.cross([&](int digit) { return histogram.count_at[digit]; }, uint64_t(top_k));
    take(kFarBucket - at.digit, histogram.count_at[at.digit]);
    const Edge edge = edge_in_bucket(top_k - at.count_above, false, 0);
    // Tokens that top-k removes have no mass.
    if (threadIdx.x < at.digit) mass_ = 0;
    if (threadIdx.x == at.digit) mass_ = edge.mass_above + edge.left * mass_of_key(edge.key);
    return edge;
  }

  __device__ Edge by_mass(float top_p, uint32_t min_key) {
    EdgeHistogram& histogram = shared_.histogram;
    weigh_buckets();
    const double target_mass = shared_.total_weight * top_p;
    const Crossing at =
        histogram.cross([&](int digit) { return shared_.weight_at[digit]; }, target_mass);
    const double left = (target_mass - at.weight_above) / bucket_scale(at.digit);
    const uint64_t whole = histogram.mass_at[at.digit];
    uint64_t target = left > 1.0 ? static_cast<uint64_t>(ceil(left)) : 1;
    target = min(target, max(whole, uint64_t{1}));
    const uint64_t count = histogram.count_at[at.digit];
    __syncthreads();
    if (kFarBucket - at.digit != bucket_) take(kFarBucket - at.digit, count);
    return edge_in_bucket(target, true, min_key);
  }

  // Select ``bucket`` for the next searches, and list its values if they fit.
  __device__ void take(int bucket, uint64_t count) {
    bucket_ = bucket;
    is_listed_ = count <= kList;
    if (!is_listed_) return;
    __syncthreads();
    if (threadIdx.x == 0) shared_.listed = 0;
    __syncthreads();
    each_in_row([&](float scaled, int token) {
      const int at = atomicAdd(&shared_.listed, 1);
      list_[at] = make_float2(scaled, __int_as_float(token));
    });
    __syncthreads();
  }

  template <typename Visit>
  __device__ __forceinline__ void each_in_row(const Visit& visit) const {
    const float from = bucket_ / kBucketsPerNat;
    const float to = bucket_ == kFarBucket ? -minus_infinity() : from + 1.0f / kBucketsPerNat;
    row_.each_group([&](int group, const float (&x)[4]) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float estimate = scaled_.estimate(x[c]);
        if (scaled_.beyond(estimate, to) || scaled_.within(estimate, from)) continue;
        const float scaled = scaled_.of(x[c]);
        const int token = 4 * group + c;
        if (scaled_.bucket(scaled) == bucket_ && token < row_.vocab) visit(scaled, token);
      }
    });
  }

  template <typename Visit>
  __device__ __forceinline__ void each_in_bucket(const Visit& visit) const {
    if (is_listed_) {
      for (int i = threadIdx.x; i < shared_.listed; i += kEdgeThreads) {
        visit(list_[i].x, __float_as_int(list_[i].y));
      }
    } else {
      each_in_row(visit);
    }
  }

  __device__ Edge edge_in_bucket(uint64_t target, bool by_mass, uint32_t min_key) {
    return find_edge(
        shared_.histogram,
        [&](const auto& visit) {
          each_in_bucket([&](float scaled, int) {
            const uint32_t key = ordered_key(scaled);
            if (key >= min_key) visit(key, scaled_.mass(scaled, bucket_, unit_));
          });
        },
        target, by_mass);
  }

  __device__ uint32_t mass_of_key(uint32_t key) const {
    return scaled_.mass(key_value(key), bucket_, unit_);
  }

  // Return the token with index ``target`` − 1 among those with this key.
  __device__ int token_of_tie(uint32_t key, uint64_t target) {
    const Edge edge = find_edge(
        shared_.histogram,
        [&](const auto& visit) {
          each_in_bucket([&](float scaled, int token) {
            if (ordered_key(scaled) == key) visit(~static_cast<uint32_t>(token), 0);
          });
        },
        target, false);
    return static_cast<int>(~edge.key);
  }

  const Row& row_;
  const Scaled& scaled_;
  TailScratch& shared_;
  float2* list_;  // (value, token), [kList]
  float unit_;
  uint64_t count_ = 0, mass_ = 0;  // of digit threadIdx.x
  int bucket_ = -1;
  bool is_listed_ = false;
};
