// TreeSelect: one CTA a sequence.
//
// The N-th largest key is found bit by bit, one barrier a bit; ties, slots and parents follow from
// counting bits of masks in shared memory. A few microseconds for a pool of 500.
#include "../_device/infinity.cuh"
#include "../_device/ordered_key.cuh"
#include "../_device/ptx.cuh"

constexpr int kMostCandidates = 4096, kMostWords = kMostCandidates / 32, kKeyBits = 32;

// A candidate's key: 0 where it is absent (−∞, or no number at all).
__device__ __forceinline__ uint32_t candidate_key(float score) {
  return score > minus_infinity() ? ordered_key(score) : 0;
}

// Set bits of ``mask`` below bit ``end``.
__device__ __forceinline__ int bits_below(const unsigned* mask, int end) {
  int count = 0;
  for (int word = 0; word < end / 32; ++word) count += __popc(mask[word]);
  if (end % 32) count += __popc(mask[end / 32] & ((1u << end % 32) - 1));
  return count;
}

extern "C" __global__ void __launch_bounds__(1024, 1)
    tree_select(const int* tokens,        // [B, M]
                const float* scores,      // [B, M]
                const int* parents,       // [B, M]
                const int* draft_tokens,  // []; not read, N is known when building
                int* tree_tokens,         // out [B, N + 1]
                int* tree_parents,        // out [B, N + 1]
                int* depths,              // out [B, N + 1]
                int* ancestor_bits,       // out [B, N + 1, W]
                int* count,               // out [B]
                int pool, int nodes, int words) {
  DYNAMIC_SHARED(int, parent_of);  // [N + 1] slots; -1 at the root and at unused slots
  __shared__ unsigned tied[kMostWords], kept[kMostWords];
  __shared__ int at_least[kKeyBits];
  pdl_launch_dependents();
  pdl_wait();
  const int b = blockIdx.x, lane = threadIdx.x % 32, wanted = nodes - 1;
  tokens += static_cast<int64_t>(b) * pool;
  scores += static_cast<int64_t>(b) * pool;
  parents += static_cast<int64_t>(b) * pool;
  const int rounds = ceil_div(pool, static_cast<int>(blockDim.x));
  // A pool larger than the block is read again from L1.
  const auto key_of = [&](int round) {
    const int i = round * blockDim.x + threadIdx.x;
    return i < pool ? candidate_key(scores[i]) : 0;
  };
  const uint32_t first_key = key_of(0);
  for (int i = threadIdx.x; i < kKeyBits; i += blockDim.x) at_least[i] = 0;
  for (int i = threadIdx.x; i < nodes; i += blockDim.x) parent_of[i] = -1;
  __syncthreads();

  // The largest key that ``wanted`` candidates reach: 0 where there are too few.
  uint32_t edge = 0;
  for (int bit = kKeyBits - 1; bit >= 0; --bit) {
    const uint32_t trial = edge | 1u << bit;
    for (int round = 0; round < rounds; ++round) {
      const uint32_t key = round == 0 ? first_key : key_of(round);
      const int reach = __popc(__ballot_sync(0xFFFFFFFFu, key >= trial));
      if (lane == 0 && reach > 0) atomicAdd(&at_least[bit], reach);
    }
    __syncthreads();
    if (at_least[bit] >= wanted) edge = trial;
  }

  // Of those that stand exactly at the edge the first ones are taken.
  for (int round = 0; round < rounds; ++round) {
    const uint32_t key = round == 0 ? first_key : key_of(round);
    const unsigned at_edge = __ballot_sync(0xFFFFFFFFu, key == edge && edge != 0);
    const unsigned above = __ballot_sync(0xFFFFFFFFu, key > edge);
    if (lane == 0) {
      const int word = (round * blockDim.x + threadIdx.x) / 32;
      tied[word] = at_edge;
      kept[word] = above;
    }
  }
  __syncthreads();
  const int all_words = ceil_div(pool, 32);
  const int room = wanted - bits_below(kept, 32 * all_words);
  __syncthreads();
  for (int word = threadIdx.x; word < all_words; word += blockDim.x) {
    int left = room - bits_below(tied, 32 * word);
    unsigned ties = tied[word];
    for (; ties != 0 && left > 0; --left) {
      kept[word] |= ties & (~ties + 1);
      ties &= ties - 1;
    }
  }
  __syncthreads();

  const int used = 1 + bits_below(kept, 32 * all_words);
  for (int i = threadIdx.x; i < pool; i += blockDim.x) {
    if (kept[i / 32] >> i % 32 & 1u) {
      const int slot = 1 + bits_below(kept, i), parent = parents[i];
      tree_tokens[b * nodes + slot] = tokens[i];
      // A kept candidate's slot is the number of kept ones up to it; that of the root is 0.
      parent_of[slot] = parent < 0 ? 0 : bits_below(kept, min(parent, i - 1) + 1);
    }
  }
  __syncthreads();
  for (int slot = threadIdx.x; slot < nodes; slot += blockDim.x) {
    if (slot == 0 || slot >= used) tree_tokens[b * nodes + slot] = -1;
    tree_parents[b * nodes + slot] = parent_of[slot];
  }
  for (int i = threadIdx.x; i < nodes * words; i += blockDim.x) {
    const int slot = i / words, word = i % words;
    unsigned bits = 0;
    int depth = -1;
    for (int node = slot; node >= 0; node = parent_of[node]) {
      if (node / 32 == word) bits |= 1u << node % 32;
      ++depth;
    }
    ancestor_bits[b * nodes * words + i] = static_cast<int>(bits);
    if (word == 0) depths[b * nodes + slot] = depth;
  }
  if (threadIdx.x == 0) count[b] = used;
}
