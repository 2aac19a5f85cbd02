// TreeExpand: CTAs rank parts of a row; the last one of a sequence joins them and ranks its nodes.
//
// Reads 4·Vd bytes a row from L2, 2048 logits a CTA and 8 a thread: a draft vocabulary of 32000 is
// 16 parts, so that one row takes the time of a few barriers and no more. The k-th best of the
// maxima of 16 groups of lanes bounds the k-th best logit of a part from below, so that few logits
// have to be ranked. A row's parts and the order in which they are joined follow from Vd alone.
#include "../_device/l2_word.cuh"
#include "../_device/log_sum_exp.cuh"
#include "../_device/ordered_key.cuh"
#include "../_device/ptx.cuh"

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kVectors = 2;  // of four logits, a thread
constexpr int kPart = kThreads * kVectors * 4;
constexpr int kGroupLanes = 16, kGroups = kThreads / kGroupLanes;
constexpr int kMostChildren = 16, kMostNodes = 16;
// Candidates of a node that a lane keeps in registers while it joins parts.
constexpr int kHeld = 8;
static_assert(kMostChildren <= kGroups, "each child needs a group whose maximum bounds it");

// Keys of a thread's logits, 0 past the vocabulary.
struct Logits {
  uint32_t keys[4 * kVectors];
  int first;

  __device__ __forceinline__ int index(int at) const {
    return first + (at / 4 * kThreads + static_cast<int>(threadIdx.x)) * 4 + at % 4;
  }

  __device__ __forceinline__ void load(const float* row, int vocab) {
    const bool aligned = vocab % 4 == 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int i = index(4 * v);
      if (aligned && i < vocab) {
        const uint4 four = load_l2_16(row + i);
        keys[4 * v] = ordered_key(__uint_as_float(four.x));
        keys[4 * v + 1] = ordered_key(__uint_as_float(four.y));
        keys[4 * v + 2] = ordered_key(__uint_as_float(four.z));
        keys[4 * v + 3] = ordered_key(__uint_as_float(four.w));
      } else {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          keys[4 * v + c] = i + c < vocab ? ordered_key(load_l2_float(row + i + c)) : 0;
        }
      }
    }
  }

  // The largest key of this lane's group, for every lane of it.
  __device__ __forceinline__ uint32_t largest_of_group() const {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 4 * kVectors; ++i) most = max(most, keys[i]);
#pragma unroll
    for (int distance = kGroupLanes / 2; distance > 0; distance /= 2) {
      most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, distance));
    }
    return most;
  }

  // Σ exp(logit − maximum) over the lanes of a warp.
  __device__ __forceinline__ float sum_of_warp(float maximum) const {
    LogSumExp part{maximum, 0.0f};
#pragma unroll
    for (int i = 0; i < 4 * kVectors; ++i) {
      if (keys[i] != 0) part.add(key_value(keys[i]));
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      part.sum += __shfl_xor_sync(0xFFFFFFFFu, part.sum, distance);
    }
    return part.sum;
  }
};

// The largest and the k-th largest of the groups' ``keys``, k <= kGroups, for every lane.
__device__ __forceinline__ uint2 first_and_kth(const uint32_t* keys, int k) {
  const int lane = threadIdx.x % 32;
  const uint32_t own = keys[lane % kGroups];
  int rank = lane < kGroups ? 0 : kGroups;
#pragma unroll
  for (int other = 0; other < kGroups; ++other) {
    const uint32_t key = keys[other];
    rank += key > own || (key == own && other < lane);
  }
  const unsigned first = __ballot_sync(0xFFFFFFFFu, rank == 0);
  const unsigned kth = __ballot_sync(0xFFFFFFFFu, rank == k - 1);
  return make_uint2(__shfl_sync(0xFFFFFFFFu, own, __ffs(static_cast<int>(first)) - 1),
                    __shfl_sync(0xFFFFFFFFu, own, __ffs(static_cast<int>(kth)) - 1));
}

// By one warp: the k best of ``count`` ranked keys, falling, to visit(rank, ranked) of every lane.
template <class Visit>
__device__ __forceinline__ void best_of_parts(const uint64_t* ranked, int count, int k,
                                              const Visit& visit) {
  const int lane = threadIdx.x % 32;
  uint64_t held[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    held[i] = i * 32 + lane < count ? load_l2_word(ranked + i * 32 + lane) : 0;
  }
  uint64_t previous = ~uint64_t{0};
  for (int rank = 0; rank < k; ++rank) {
    uint64_t mine = 0;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (held[i] < previous && held[i] > mine) mine = held[i];
    }
    for (int i = kHeld * 32 + lane; i < count; i += 32) {
      const uint64_t further = load_l2_word(ranked + i);
      if (further < previous && further > mine) mine = further;
    }
    previous = warp_max(mine);
    visit(rank, previous);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    tree_expand(const float* logits,          // [B·F, Vd]
                const float* score,           // [B, F]
                const int* d2t,               // [Vd]
                const int* top_k,             // []; not read, k is known when building
                int* tokens,                  // out [B, F·K]
                float* scores,                // out [B, F·K]
                int* frontier,                // out [B, K]
                uint64_t* workspace_best,     // [B·F, parts, K]: ranked keys, 0 where there is none
                float2* workspace_sums,       // [B·F, parts]: maximum, Σ exp below it
                unsigned* workspace_arrived,  // [B], zeros before and after
                int vocab, int k, int nodes) {
  __shared__ uint64_t found[kPart], candidates[kMostChildren * kMostNodes];
  __shared__ uint32_t of_groups[kGroups];
  __shared__ float of_warps[kWarps];
  __shared__ int count;
  __shared__ bool is_last;
  pdl_launch_dependents();
  pdl_wait();
  const int part = blockIdx.x, parts = gridDim.x, row = blockIdx.y, b = row / nodes;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) count = 0;

  Logits own;
  own.first = part * kPart;
  own.load(logits + static_cast<int64_t>(row) * vocab, vocab);
  const uint32_t of_group = own.largest_of_group();
  if (lane % kGroupLanes == 0) of_groups[threadIdx.x / kGroupLanes] = of_group;
  __syncthreads();
  const uint2 bounds = first_and_kth(of_groups, k);
  const uint32_t bound = max(bounds.y, 1u);
  const float maximum = key_value(bounds.x);
  const float of_warp = own.sum_of_warp(maximum);
  if (lane == 0) of_warps[warp] = of_warp;
#pragma unroll
  for (int i = 0; i < 4 * kVectors; ++i) {
    // Whatever the order in which threads come, each entry gets its rank below.
    if (own.keys[i] >= bound) {
      found[atomicAdd(&count, 1)] = ranked_key(own.keys[i], own.index(i));
    }
  }
  __syncthreads();
  const int64_t place = static_cast<int64_t>(row) * parts + part;
  for (int i = threadIdx.x; i < max(count, k); i += kThreads) {
    int rank = i;
    if (i < count) {
      rank = 0;
      for (int other = 0; other < count; ++other) rank += found[other] > found[i];
    }
    if (rank < k) workspace_best[place * k + rank] = i < count ? found[i] : 0;
  }
  if (threadIdx.x == 0) {
    float sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) sum += of_warps[w];
    workspace_sums[place] = make_float2(maximum, sum);
  }

  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(workspace_arrived + b, 1u) == nodes * parts - 1;
    if (is_last) workspace_arrived[b] = 0;
    __threadfence();
  }
  __syncthreads();
  if (!is_last) return;
  for (int node = warp; node < nodes; node += kWarps) {
    const int joined = b * nodes + node;
    const float parent = load_l2_float(score + joined);
    LogSumExp total;
    const float* sums = reinterpret_cast<const float*>(workspace_sums) + 2 * joined * parts;
    for (int i = lane; i < parts; i += 32) {
      total.join(load_l2_float(sums + 2 * i), load_l2_float(sums + 2 * i + 1));
    }
    const float log_total = warp_join(total).value();
    uint64_t mine = 0;
    best_of_parts(workspace_best + static_cast<int64_t>(joined) * parts * k, parts * k, k,
                  [&](int rank, uint64_t ranked) {
                    if (lane == rank) mine = ranked;
                  });
    if (lane < k) {
      const int draft_id = static_cast<int>(ranked_index(mine));
      const float log_p = key_value(static_cast<uint32_t>(mine >> 32)) - log_total;
      // Written so that a NaN stays one.
      const float child = parent + (log_p > 0.0f ? 0.0f : log_p);
      tokens[joined * k + lane] = draft_id + d2t[draft_id];
      scores[joined * k + lane] = child;
      candidates[node * k + lane] = ranked_key(ordered_key(child), node * k + lane);
    }
  }
  __syncthreads();
  const int all = nodes * k;
  for (int i = threadIdx.x; i < all; i += kThreads) {
    int rank = 0;
    for (int other = 0; other < all; ++other) rank += candidates[other] > candidates[i];
    if (rank < k) frontier[b * k + rank] = i;
  }
}
