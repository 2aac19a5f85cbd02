// DsaIndexer, second launch: the slots that each row attends to, by the scores of the first.
//
//   row_start      i32  [B + 1]
//   row_slot, positions  i32 [T]
//   tree_start, budget   i32 [B]
//   ancestor_bits  i32  [T, WORDS]
//   selected       i32  [T, views, held], out
//   workspace_scores  f32 [T, views, capacity]
//   workspace_counts  i32 [T, views, kDigits]: how many scores have a digit; zeros afterwards
//   workspace_marks   u32 [T, views, 2, words]: bits of the slots that are taken for certain, and
//   of
//                     those that have the last one's digit
//   workspace_near    {key, slot} [T, views, most_near]: the latter, in any order
//   workspace_state   i32 [T, views, 2]: CTAs that arrived, and entries of workspace_near; zeros
//                     before and afterwards
//
// Grid (parts of the slots, T, views). What a row must keep is known from where it stands; of the
// slots that it chooses among it takes the best. The digit of the last one taken follows from the
// counts; each CTA then knows of all its slots but those of that digit whether they are taken. The
// last CTA to arrive orders these few by the rest of their keys, 11 bits and 10, on ties by slot,
// and writes the list. Where they are more than workspace_near holds it reads all scores again,
// where the digit is that of zero they are equal. Nothing depends on who arrives when.
//
// At 131k a row's scores are 512 kB of L2, read once by 32 CTAs, and some thousand of them again.
#include "../_device/list_range.cuh"
#include "../_device/ptx.cuh"
#include "digits.cuh"

namespace {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr int kWarps = THREADS / 32, kSlotsOfACta = 4 * THREADS;

// The sum of `value` over the threads in front of this one; `total` is that of all.
__device__ __forceinline__ int sum_before(int value, int (&sums)[kWarps], int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int upto = value;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(kAllLanes, upto, distance);
    if (lane >= distance) upto += other;
  }
  __syncthreads();
  if (lane == 31) sums[warp] = upto;
  __syncthreads();
  int before = upto - value;
  total = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) before += sums[i];
    total += sums[i];
  }
  return before;
}

// The key of the last slot that a row takes, as far as it is known, and how many slots of all that
// have this much of it are still to take.
struct Edge {
  uint32_t key;
  int left;
};

// Settles the next digit of the edge, with all threads.
__device__ __forceinline__ void settle_digit(const int* counts, int shift, Edge& edge,
                                             int (&sums)[kWarps], int (&found)[2]) {
  constexpr int kOwn = kDigits / THREADS;
  const int top = kDigits - 1 - static_cast<int>(threadIdx.x) * kOwn;
  int own = 0, total;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) own += counts[top - i];
  int above = sum_before(own, sums, total);
  if (above < edge.left && above + own >= edge.left) {
    int digit = top;
    while (above + counts[digit] < edge.left) above += counts[digit--];
    found[0] = digit;
    found[1] = above;
  }
  __syncthreads();
  edge.key |= static_cast<uint32_t>(found[0]) << shift;
  edge.left -= found[1];
}

// The slots whose keys have the edge's first digit: those that are listed, or among all scores.
struct Near {
  const uint2* listed;  // null where they are too many
  const float* scores;
  int count, low;  // of what is read; the slot of the first score
  uint32_t digit;

  // `use` gets key and slot, with whole warps: slot −1 is none.
  template <typename Use>
  __device__ __forceinline__ void each(const Use& use) const {
    constexpr int kAtOnce = 4;
    const int lane = threadIdx.x % 32;
    for (int first = threadIdx.x - lane; first < count; first += kAtOnce * THREADS) {
      uint32_t keys[kAtOnce];
      int slots[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = first + i * THREADS + lane;
        slots[i] = -1;
        keys[i] = 0;
        if (at < count && listed != nullptr) {
          const int* entry = reinterpret_cast<const int*>(listed + at);
          keys[i] = static_cast<uint32_t>(load_l2_int(entry));
          slots[i] = load_l2_int(entry + 1);
        } else if (at < count) {
          keys[i] = ordered_key(scores[low + at]);
          slots[i] = keys[i] >> kDigitShift == digit ? low + at : -1;
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) use(keys[i], slots[i]);
    }
  }
};

// Settles what is left of the edge and marks what it decides, with all threads: `taken` gets the
// slots above it, `tied` those at it.
__device__ __forceinline__ void settle_near(const Near& near, Edge& edge, uint32_t* taken,
                                            uint32_t* tied, int words, int* counts,
                                            int (&sums)[kWarps], int (&found)[2]) {
  for (int i = threadIdx.x; i < words; i += THREADS) tied[i] = 0;
#pragma unroll
  for (int pass = 0; pass < 2; ++pass) {
    const int shift = pass == 0 ? 10 : 0, bits = pass == 0 ? 11 : 10;
    __syncthreads();
    for (int i = threadIdx.x; i < kDigits; i += THREADS) counts[i] = 0;
    __syncthreads();
    near.each([&](uint32_t key, int slot) {
      const bool counted = slot >= 0 && key >> (shift + bits) == edge.key >> (shift + bits);
      if (counted) atomicAdd(&counts[key >> shift & ((1u << bits) - 1u)], 1);
    });
    __syncthreads();
    settle_digit(counts, shift, edge, sums, found);
  }
  near.each([&](uint32_t key, int slot) {
    if (slot >= 0 && key > edge.key) atomicOr(&taken[slot / 32], 1u << slot % 32);
    if (slot >= 0 && key == edge.key) atomicOr(&tied[slot / 32], 1u << slot % 32);
  });
  __syncthreads();
}

// The list of all slots that are taken, with the first `left` of those tied, and of the tree's.
__device__ __forceinline__ void write_list(int* list, int held, const uint32_t* taken,
                                           const uint32_t* tied, int words, int left, int start,
                                           int nodes, const int* ancestors, int (&sums)[kWarps]) {
  // Each thread has some words of its own.
  const int of_a_thread = ceil_div(words, THREADS);
  const int begin = min(static_cast<int>(threadIdx.x) * of_a_thread, words);
  const int stop = min(begin + of_a_thread, words);
  int ties = 0, kept = 0, total;
  for (int word = begin; word < stop; ++word) {
    ties += __popc(tied[word]);
    kept += __popc(taken[word]);
  }
  const int rank = sum_before(ties, sums, total);
  int more = min(max(left - rank, 0), ties);
  int at = sum_before(kept + more, sums, total);
  for (int word = begin; word < stop; ++word) {
    uint32_t bits = taken[word];
    for (uint32_t tie = tied[word]; tie != 0 && more > 0; --more, tie &= tie - 1) {
      bits |= tie & (~tie + 1u);
    }
    for (; bits != 0; bits &= bits - 1) {
      list[at++] = 32 * word + __ffs(static_cast<int>(bits)) - 1;
    }
  }
  for (int i = total + threadIdx.x; i < held; i += THREADS) {
    list[i] = i < total + nodes ? start + set_bit<WORDS>(ancestors, i - total) : -1;
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    select_slots(const int* row_start, const int* row_slot, const int* tree_start,
                 const int* ancestor_bits, const int* positions, const int* budget, int* selected,
                 const float* workspace_scores, int* workspace_counts, uint32_t* workspace_marks,
                 uint2* workspace_near, int* workspace_state, int batch, int capacity, int held,
                 int most_near, int threshold, int first_tokens, int recent_tokens) {
  DYNAMIC_SHARED(uint32_t, taken);  // [words] of all slots, and as many for `tied`
  __shared__ int counts[kDigits], sums[kWarps], found[2];
  __shared__ bool last;
  pdl_launch_dependents();
  pdl_wait();
  const int row = blockIdx.y, view = blockIdx.z, views = gridDim.z, lane = threadIdx.x % 32;
  const int64_t place = static_cast<int64_t>(row) * views + view;
  int* list = selected + place * held;
  int b = 0;
  while (b < batch && row >= row_start[b + 1]) ++b;
  const bool whole = b < batch && (budget[b] < 0 || positions[row] < threshold);
  if (b == batch || whole) {
    for (int i = threadIdx.x; blockIdx.x == 0 && i < held; i += THREADS) {
      list[i] = whole && i == 0 ? -2 : -1;
    }
    return;
  }
  const int start = tree_start[b];
  const int* ancestors = ancestor_bits + static_cast<int64_t>(row) * WORDS;
  const ListRange range =
      list_range<WORDS>(row_slot[row], start, ancestors, first_tokens, recent_tokens);
  const int parts = max(1, ceil_div(range.chain, kSlotsOfACta));
  if (static_cast<int>(blockIdx.x) >= parts) return;
  const int wanted = min(budget[b], range.others());
  const bool chooses = wanted > 0 && wanted < range.others();
  const float* scores = workspace_scores + place * capacity;
  int* all_counts = workspace_counts + place * kDigits;

  // This thread's slots.
  const int slot = (static_cast<int>(blockIdx.x) * THREADS + static_cast<int>(threadIdx.x)) * 4;
  uint32_t keys[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool among = slot + i >= range.low && slot + i < range.late;
    keys[i] = chooses && among ? ordered_key(scores[slot + i]) : 0;
  }
  Edge edge{0, wanted};
  if (chooses) {
    for (int i = threadIdx.x; i < kDigits; i += THREADS) counts[i] = load_l2_int(all_counts + i);
    __syncthreads();
    settle_digit(counts, kDigitShift, edge, sums, found);
  }
  const uint32_t digit = edge.key >> kDigitShift;
  uint32_t take = 0, near = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool seen = slot + i < range.chain;
    const bool among = slot + i >= range.low && slot + i < range.late;
    const bool better = chooses ? keys[i] >> kDigitShift > digit : wanted > 0;
    if (seen && (!among || better)) take |= 1u << i;
    if (chooses && among && keys[i] >> kDigitShift == digit) near |= 1u << i;
  }

  // Those of the edge's digit are listed; zeros are equal, and need no order.
  uint2* listed = workspace_near + place * most_near;
  int* state = workspace_state + 2 * place;
  if (digit != kZeroDigit && __ballot_sync(kAllLanes, near != 0) != 0) {
    const int own = __popc(near);
    int upto = own;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(kAllLanes, upto, distance);
      if (lane >= distance) upto += other;
    }
    int at = 0;
    if (lane == 31) at = atomicAdd(&state[1], upto);
    at = __shfl_sync(kAllLanes, at, 31) + upto - own;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!(near >> i & 1u)) continue;
      if (at < most_near) listed[at] = make_uint2(keys[i], slot + i);
      ++at;
    }
  }
  const int words = ceil_div(range.chain, 32), all_words = ceil_div(capacity, 32);
  uint32_t* marks = workspace_marks + place * 2 * all_words;
  take <<= slot % 32;
  near <<= slot % 32;
#pragma unroll
  for (int distance = 1; distance < 8; distance *= 2) {
    take |= __shfl_xor_sync(kAllLanes, take, distance);
    near |= __shfl_xor_sync(kAllLanes, near, distance);
  }
  if (lane % 8 == 0 && slot < range.chain) {
    marks[slot / 32] = take;
    marks[all_words + slot / 32] = near;
  }

  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(&state[0], 1) == parts - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  uint32_t* tied = taken + all_words;
  for (int i = threadIdx.x; i < words; i += THREADS) {
    const int* pair = reinterpret_cast<const int*>(marks) + i;
    taken[i] = static_cast<uint32_t>(load_l2_int(pair));
    tied[i] = static_cast<uint32_t>(load_l2_int(pair + all_words));
  }
  for (int i = threadIdx.x; chooses && i < kDigits; i += THREADS) all_counts[i] = 0;
  const int count = load_l2_int(&state[1]);
  __syncthreads();
  if (threadIdx.x == 0) state[0] = state[1] = 0;
  if (chooses && digit != kZeroDigit) {
    const bool fits = count <= most_near;
    const Near candidates{fits ? listed : nullptr, scores, fits ? count : range.others(), range.low,
                          digit};
    settle_near(candidates, edge, taken, tied, words, counts, sums, found);
  }
  write_list(list, held, taken, tied, words, edge.left, start, range.nodes, ancestors, sums);
}
