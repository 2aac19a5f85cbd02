// TreeExpand: CTAs rank parts of a row; the last CTA of a sequence merges them and ranks its nodes.
//
// A row reads 4·Vd bytes from L2, 2048 logits per CTA and 8 per thread. A draft vocabulary of 32000
// has 16 parts, so that a row takes the time of a few barriers. The k-th largest of the maxima of
// 16 groups of lanes is a lower bound of the k-th largest logit of a part, so that few logits must
// be ranked. The parts of a row, and the order in which they are merged, depend on Vd only.
//
// Memory latencies determine the time: of the logits, the arrival count, the results of all parts
// at once, and the target tokens of the candidates.
#include "../_device/arrival.cuh"
#include "../_device/l2_word.cuh"
#include "device/log_sum_exp.cuh"
#include "../_device/ordered_key.cuh"
#include "../_device/philox.cuh"

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kVectors = 2;  // of four logits, a thread
constexpr int kPart = kThreads * kVectors * 4;
constexpr int kGroupLanes = 16, kGroups = kThreads / kGroupLanes;
constexpr int kMaxChildren = 16, kMaxNodes = 16;
// The ratio of the draft's temperature to the request's: drafts are flatter than their targets.
constexpr float kTemperatureRatio = 0.7f;
// Candidates of a node in registers of a lane while it merges parts.
constexpr int kHeld = 8;
static_assert(kMaxChildren <= kGroups, "each child needs a group whose maximum bounds it");

// Keys of a thread's logits; 0 past the vocabulary.
struct Logits {
  uint32_t keys[4 * kVectors];
  int first;

  __device__ __forceinline__ int index(int at) const {
    return first + (at / 4 * kThreads + static_cast<int>(threadIdx.x)) * 4 + at % 4;
  }

  // All loads are issued before the first key is computed.
  __device__ __forceinline__ void load(const float* row, int vocab) {
    uint32_t bits[4 * kVectors];
    const bool aligned = vocab % 4 == 0;
    if (aligned) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int i = index(4 * v);
        const uint4 four = i < vocab ? load_l2_16(row + i) : make_uint4(0, 0, 0, 0);
        bits[4 * v] = four.x;
        bits[4 * v + 1] = four.y;
        bits[4 * v + 2] = four.z;
        bits[4 * v + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4 * kVectors; ++i) {
        bits[i] = index(i) < vocab ? __float_as_uint(load_l2_float(row + index(i))) : 0;
      }
    }
#pragma unroll
    for (int i = 0; i < 4 * kVectors; ++i) {
      keys[i] = index(i) < vocab ? ordered_key(__uint_as_float(bits[i])) : 0;
    }
  }

  // Replace each logit by logit / (ratio · temperature) + noise. The noise depends on the token in
  // the target's vocabulary. A thread stores its noise in its entries of ``scratch`` [kPart], so
  // that the loop is not unrolled and its code is short.
  __device__ __forceinline__ void perturb(float temperature, int seed, int position, const int* d2t,
                                          int vocab, float* scratch) {
    const float divisor = kTemperatureRatio * temperature;
    float* noise = scratch + threadIdx.x;
#pragma unroll 1
    for (int v = 0; v < kVectors; ++v) {
      const int start = index(4 * v);
      const int token = start < vocab ? start + d2t[start] : 0;
      // Without a draft vocabulary, four tokens share their random words.
      const bool share =
          token == start && start + 3 < vocab && start + 3 + d2t[start + 3] == start + 3;
      if (share) {
        const uint4 bits = positional_bits(seed, position, start / 4);
        noise[(4 * v) * kThreads] = gumbel(bits.x);
        noise[(4 * v + 1) * kThreads] = gumbel(bits.y);
        noise[(4 * v + 2) * kThreads] = gumbel(bits.z);
        noise[(4 * v + 3) * kThreads] = gumbel(bits.w);
      } else {
#pragma unroll 2
        for (int i = 0; i < 4; ++i) {
          const int draft_id = start + i;
          noise[(4 * v + i) * kThreads] =
              draft_id < vocab ? positional_gumbel(seed, position, draft_id + d2t[draft_id]) : 0.0f;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4 * kVectors; ++i) {
      if (index(i) < vocab) {
        keys[i] = ordered_key(key_value(keys[i]) / divisor + noise[i * kThreads]);
      }
    }
  }

  __device__ __forceinline__ uint32_t largest() const {
    uint32_t largest_key = 0;
#pragma unroll
    for (int i = 0; i < 4 * kVectors; ++i) largest_key = max(largest_key, keys[i]);
    return largest_key;
  }

  // Return Σ exp(logit − maximum) over the lanes of a warp.
  __device__ __forceinline__ float sum_of_warp(float maximum) const {
    // Logits of −∞, and entries past the vocabulary, add exp(−∞). There is no branch, so that the
    // exponentials are independent.
    const float top = maximum == minus_infinity() ? 0.0f : maximum;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4 * kVectors; ++i) {
      sum += expf((keys[i] == 0 ? minus_infinity() : key_value(keys[i])) - top);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, distance);
    }
    return sum;
  }
};

// Return the largest key of this lane's group, to every lane of it.
__device__ __forceinline__ uint32_t largest_of_group(uint32_t largest_key) {
#pragma unroll
  for (int distance = kGroupLanes / 2; distance > 0; distance /= 2) {
    largest_key = max(largest_key, __shfl_xor_sync(kAllLanes, largest_key, distance));
  }
  return largest_key;
}

// Return the largest and the k-th largest of the groups' ``keys``, k <= kGroups, to every lane.
__device__ __forceinline__ uint2 first_and_kth(const uint32_t* keys, int k) {
  const int lane = threadIdx.x % 32;
  const uint32_t own = keys[lane % kGroups];
  int rank = lane < kGroups ? 0 : kGroups;
#pragma unroll
  for (int other = 0; other < kGroups; ++other) {
    const uint32_t key = keys[other];
    rank += key > own || (key == own && other < lane);
  }
  const unsigned first = __ballot_sync(kAllLanes, rank == 0);
  const unsigned kth = __ballot_sync(kAllLanes, rank == k - 1);
  return make_uint2(__shfl_sync(kAllLanes, own, __ffs(static_cast<int>(first)) - 1),
                    __shfl_sync(kAllLanes, own, __ffs(static_cast<int>(kth)) - 1));
}

// A candidate of a node, and the offset of its token in the target's vocabulary.
struct Candidate {
  uint64_t ranked;
  int offset;
};

// The best candidates of all parts of a row, in one warp. The first kHeld of a lane are in
// registers; their loads are issued together.
struct PartsBest {
  const uint64_t* ranked;
  const int* d2t;
  int count;
  Candidate held[kHeld];

  __device__ __forceinline__ PartsBest(const uint64_t* of_parts, int candidates, const int* offsets)
      : ranked(of_parts), d2t(offsets), count(candidates) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      held[i].ranked = i * 32 + lane < count ? load_l2_word(ranked + i * 32 + lane) : 0;
    }
  }

  __device__ __forceinline__ int offset(uint64_t candidate) const {
    return candidate == 0 ? 0 : d2t[ranked_index(candidate)];
  }

  // Start to load the offsets of the tokens.
  __device__ __forceinline__ void load_offsets() {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) held[i].offset = offset(held[i].ranked);
  }

  // Call visit(rank, candidate) for the k best, in falling order, in the lane that has the
  // candidate.
  template <class Visit>
  __device__ __forceinline__ void best(int k, const Visit& visit) const {
    const int lane = threadIdx.x % 32;
    uint64_t previous = ~uint64_t{0};
#pragma unroll 1
    for (int rank = 0; rank < k; ++rank) {
      Candidate mine{0, 0};
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (held[i].ranked < previous && held[i].ranked > mine.ranked) mine = held[i];
      }
      bool is_held = true;
#pragma unroll 4
      for (int i = kHeld * 32 + lane; i < count; i += 32) {
        const uint64_t further = load_l2_word(ranked + i);
        if (further < previous && further > mine.ranked) {
          mine.ranked = further;
          is_held = false;
        }
      }
      previous = warp_max(mine.ranked);
      if (mine.ranked == previous) {
        if (!is_held) mine.offset = offset(previous);
        visit(rank, mine);
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads)
    tree_expand(const float* logits,       // [B·F, Vd]
                const float* score,        // [B, F]
                const int* d2t,            // [Vd]
                const int* top_k,          // []; not read, because k is known at build time
                const float* temperature,  // [B], or null: no noise
                const int* seed,           // [B]
                const int* position,       // [B]
                const float* form,         // [F·K], or null: scores below 0 replace children's
                int* tokens,               // out [B, F·K]
                float* scores,             // out [B, F·K]
                int* frontier,             // out [B, K]
                uint64_t* workspace_best,  // [B·F, parts, K]: ranked keys, or 0
                float2* workspace_sums,    // [B·F, parts]: maximum, Σ exp below it
                int* workspace_arrived,    // [B], zeros before and after
                int vocab, int k, int nodes, int offset, int per_node) {
  __shared__ uint64_t shortlist[kPart], candidates[kMaxChildren * kMaxNodes];
  __shared__ uint32_t of_groups[kGroups];
  __shared__ float of_warps[kWarps];
  __shared__ int count, is_last;
  pdl_launch_dependents();
  const int part = blockIdx.x, parts = gridDim.x, row = blockIdx.y, b = row / nodes;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // A prefetch: since its last use, a step has evicted this weight from L2.
  if (row == 0) {
    const int token = part * kPart + static_cast<int>(threadIdx.x) * 32;
    if (threadIdx.x < kPart / 32 && token < vocab) warm_l2(d2t + token);
  }
  pdl_wait();
  if (threadIdx.x == 0) count = 0;

  const float row_temperature = temperature == nullptr ? 0.0f : load_l2_float(temperature + b);
  Logits own;
  own.first = part * kPart;
  own.load(logits + static_cast<int64_t>(row) * vocab, vocab);
  if (row_temperature > 0.0f) {
    const int at = load_l2_int(position + b) + offset + per_node * (row % nodes);
    own.perturb(row_temperature, load_l2_int(seed + b), at, d2t, vocab,
                reinterpret_cast<float*>(shortlist));
  }
  const uint32_t largest = own.largest(), of_group = largest_of_group(largest);
  if (lane % kGroupLanes == 0) of_groups[threadIdx.x / kGroupLanes] = of_group;
  __syncthreads();
  const uint2 bounds = first_and_kth(of_groups, k);
  const uint32_t bound = max(bounds.y, 1u);
  const float maximum = key_value(bounds.x);
  const float of_warp = own.sum_of_warp(maximum);
  if (lane == 0) of_warps[warp] = of_warp;
  if (largest >= bound) {
#pragma unroll
    for (int i = 0; i < 4 * kVectors; ++i) {
      // The order in which threads arrive does not matter: each entry is ranked below.
      if (own.keys[i] >= bound) {
        shortlist[atomicAdd(&count, 1)] = ranked_key(own.keys[i], own.index(i));
      }
    }
  }
  __syncthreads();
  const int64_t place = static_cast<int64_t>(row) * parts + part;
#pragma unroll 1
  for (int i = threadIdx.x; i < max(count, k); i += kThreads) {
    int rank = i;
    if (i < count) {
      rank = 0;
#pragma unroll 4
      for (int other = 0; other < count; ++other) rank += shortlist[other] > shortlist[i];
    }
    if (rank < k) workspace_best[place * k + rank] = i < count ? shortlist[i] : 0;
  }
  if (threadIdx.x == 0) {
    float sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) sum += of_warps[w];
    workspace_sums[place] = make_float2(maximum, sum);
  }

  if (!is_last_of(workspace_arrived + b, nodes * parts, &is_last)) return;
#pragma unroll 1
  for (int node = warp; node < nodes; node += kWarps) {
    const int joined = b * nodes + node;
    PartsBest best_of_parts(workspace_best + static_cast<int64_t>(joined) * parts * k, parts * k,
                            d2t);
    const float parent = load_l2_float(score + joined);
    const float2* sums = workspace_sums + joined * parts;
    const float2 first =
        lane < parts ? load_l2_float2(sums + lane) : make_float2(minus_infinity(), 0.0f);
    LogSumExp total{first.x, first.y};
#pragma unroll 1
    for (int i = 32 + lane; i < parts; i += 32) {
      const float2 further = load_l2_float2(sums + i);
      total.join(further.x, further.y);
    }
    // After the loop, so that the loads before are issued before the first key is used.
    best_of_parts.load_offsets();
    const float log_total = warp_join(total).value();
    best_of_parts.best(k, [&](int rank, const Candidate& candidate) {
      const int draft_id = static_cast<int>(ranked_index(candidate.ranked));
      const float log_p = key_value(static_cast<uint32_t>(candidate.ranked >> 32)) - log_total;
      // Written so that a NaN remains NaN.
      float child = parent + (log_p > 0.0f ? 0.0f : log_p);
      const int place = node * k + rank;
      const float fixed = form == nullptr ? 0.0f : load_l2_float(form + place);
      if (fixed < 0.0f) child = fixed;
      tokens[b * nodes * k + place] = draft_id + candidate.offset;
      scores[b * nodes * k + place] = child;
      candidates[place] = ranked_key(ordered_key(child), place);
    });
  }
  __syncthreads();
  const int all = nodes * k;
#pragma unroll 1
  for (int i = threadIdx.x; i < all; i += kThreads) {
    int rank = 0;
#pragma unroll 4
    for (int other = 0; other < all; ++other) rank += candidates[other] > candidates[i];
    if (rank < k) frontier[b * k + rank] = i;
  }
}
