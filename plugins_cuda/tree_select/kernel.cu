// TreeSelect: one CTA per sequence.
//
// A search over the bits of the keys determines the N-th largest key, with one barrier per bit and
// 1024 candidates. It ends as soon as exactly N candidates are left: before the first bit in a
// chain that is selected completely. Ties, slots and parents follow from bit counts of a mask in
// shared memory. A pool up to the block size has one memory latency.
#include "../_device/infinity.cuh"
#include "../_device/ordered_key.cuh"
#include "../_device/ptx.cuh"

constexpr int kMaxCandidates = 4096, kMaxWords = kMaxCandidates / 32;

// The key of a candidate: 0 if it is absent (−∞ or NaN).
__device__ __forceinline__ uint32_t candidate_key(float score) {
  return score > minus_infinity() ? ordered_key(score) : 0;
}

// The selected candidates: a mask, and the number of candidates before each of its words.
struct KeptMask {
  unsigned words[kMaxWords + 1];
  int before[kMaxWords + 1];

  __device__ __forceinline__ bool holds(int i) const {
    return words[i / 32] >> i % 32 & 1u;
  }
  // Return how many of the first ``end`` candidates are selected.
  __device__ __forceinline__ int below(int end) const {
    return before[end / 32] + __popc(words[end / 32] & ((1u << end % 32) - 1));
  }
};

// One warp adds the first ties to the ``count`` words of candidates above the edge, up to
// ``num_selected`` candidates, and counts them.
__device__ __forceinline__ void keep_first_ties(KeptMask& kept, const unsigned* tied, int count,
                                                int num_selected) {
  const int lane = threadIdx.x % 32;
  int above = 0;
#pragma unroll 1
  for (int word = lane; word < count; word += 32) above += __popc(kept.words[word]);
  int remaining = num_selected - __shfl_sync(kAllLanes, warp_prefix_sum(above), 31), before = 0;
#pragma unroll 1
  for (int first = 0; first < count; first += 32) {
    const int word = first + lane;
    unsigned ties = word < count ? tied[word] : 0, keeps = word < count ? kept.words[word] : 0;
    const int ties_through = warp_prefix_sum(__popc(ties));
    int left = remaining - (ties_through - __popc(ties));
    for (; ties != 0 && left > 0; --left) {
      keeps |= ties & (~ties + 1);
      ties &= ties - 1;
    }
    const int through = before + warp_prefix_sum(__popc(keeps));
    if (word < count) {
      kept.words[word] = keeps;
      kept.before[word] = through - __popc(keeps);
    }
    remaining -= __shfl_sync(kAllLanes, ties_through, 31);
    before = __shfl_sync(kAllLanes, through, 31);
  }
  if (lane == 0) {
    kept.words[count] = 0;
    kept.before[count] = before;
  }
}

extern "C" __global__ void __launch_bounds__(1024, 1)
    tree_select(const int* tokens,        // [B, M]
                const float* scores,      // [B, M]
                const int* parents,       // [B, M]
                const int* draft_tokens,  // []; not read, because N is known at build time
                int* tree_tokens,         // out [B, N + 1]
                int* tree_parents,        // out [B, N + 1]
                int* depths,              // out [B, N + 1]
                int* ancestor_bits,       // out [B, N + 1, W]
                int* count,               // out [B]
                int pool, int nodes, int words) {
  DYNAMIC_SHARED(int, parent_of);  // [N + 1] slots; -1 at the root and at unused slots
  __shared__ unsigned tied[kMaxWords];
  __shared__ KeptMask kept;
  pdl_launch_dependents();
  pdl_wait();
  const int b = blockIdx.x, lane = threadIdx.x % 32, num_selected = nodes - 1;
  tokens += static_cast<int64_t>(b) * pool;
  scores += static_cast<int64_t>(b) * pool;
  parents += static_cast<int64_t>(b) * pool;
  const int all_words = ceil_div(pool, 32);
  const int rounds = ceil_div(pool, static_cast<int>(blockDim.x));
  // The first candidate of a thread.
  const int own = min(static_cast<int>(threadIdx.x), pool - 1);
  const float own_score = load_l2_float(scores + own);
  const int own_token = load_l2_int(tokens + own), own_parent = load_l2_int(parents + own);
  for (int i = threadIdx.x; i < nodes; i += blockDim.x) parent_of[i] = -1;
  // A pool larger than the block is read again from L1.
  const auto key_of = [&](int round) {
    const int i = round * blockDim.x + threadIdx.x;
    if (round == 0) return i < pool ? candidate_key(own_score) : 0;
    return i < pool ? candidate_key(scores[i]) : 0;
  };
  const auto reach = [&](uint32_t trial) {
    int reached = 0;
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
      reached += __syncthreads_count(key_of(round) >= trial);
    }
    return reached;
  };

  // A key that ``num_selected`` candidates reach, more only because of ties; 0 if there are fewer
  // candidates.
  uint32_t edge = 0;
  if (reach(1) > num_selected) {
#pragma unroll 1
    for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
      const int reached = reach(edge | bit);
      if (reached >= num_selected) edge |= bit;
      if (reached == num_selected) break;
    }
  }

  // Of the candidates at the edge, the first ones are selected.
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    const uint32_t key = key_of(round);
    const unsigned at_edge = __ballot_sync(kAllLanes, key == edge && edge != 0);
    const unsigned above = __ballot_sync(kAllLanes, key > edge);
    const int word = (round * blockDim.x + threadIdx.x) / 32;
    if (lane == 0 && word < all_words) {
      tied[word] = at_edge;
      kept.words[word] = above;
    }
  }
  __syncthreads();
  if (threadIdx.x < 32) keep_first_ties(kept, tied, all_words, num_selected);
  __syncthreads();

  const int used = 1 + kept.before[all_words];
#pragma unroll 1
  for (int i = threadIdx.x; i < pool; i += blockDim.x) {
    if (kept.holds(i)) {
      const bool is_own = i == static_cast<int>(threadIdx.x);
      const int slot = 1 + kept.below(i), parent = is_own ? own_parent : parents[i];
      tree_tokens[b * nodes + slot] = is_own ? own_token : tokens[i];
      // A candidate's slot is the number of selected ones up to it; the slot of the root is 0.
      parent_of[slot] = parent < 0 ? 0 : kept.below(min(parent, i - 1) + 1);
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int slot = threadIdx.x; slot < nodes; slot += blockDim.x) {
    if (slot == 0 || slot >= used) tree_tokens[b * nodes + slot] = -1;
    tree_parents[b * nodes + slot] = parent_of[slot];
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < nodes * words; i += blockDim.x) {
    const int slot = i / words, word = i % words;
    unsigned bits = 0;
    int depth = -1;
#pragma unroll 1
    for (int node = slot; node >= 0; node = parent_of[node]) {
      if (node / 32 == word) bits |= 1u << node % 32;
      ++depth;
    }
    ancestor_bits[b * nodes * words + i] = static_cast<int>(bits);
    if (word == 0) depths[b * nodes + slot] = depth;
  }
  if (threadIdx.x == 0) count[b] = used;
}
