// DsaCheck: lists of slots that are not what they must be, and full attention in their place.
//
//   selected       i32 [T, views, held]
//   row_start      i32 [B + 1]
//   row_slot, positions  i32 [T]
//   tree_start, budget   i32 [B]
//   ancestor_bits  i32 [T, WORDS]
//   checked        i32 [T, views, held], out; rows of no sequence are not written
//   violations     i32 [B], out
//
// A CTA per sequence, a warp per list: what a row sees and must keep is counted from where it
// stands, and each entry is held to the one in front of it. Four lists of 2150 are 34 kB to read
// and as many to write, a few µs.
#include "../_device/attention_rows.cuh"
#include "../_device/ptx.cuh"

constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// What DsaIndexer may give a row: `wanted` slots, `kept` of them below `first` or from `late` on.
struct Promise {
  int start, chain, first, late, kept, wanted;
  const int* ancestors;

  __device__ __forceinline__ bool sees(int slot) const {
    if (slot < chain) return slot >= 0;
    const int node = slot - start;
    if (slot < start || node >= 32 * WORDS) return false;
    return static_cast<uint32_t>(ancestors[node / 32]) >> (node % 32) & 1u;
  }
};

__device__ __forceinline__ Promise promise_of(int own, int start, int budget, const int* ancestors,
                                              int first_tokens, int recent_tokens) {
  const int nodes = bits_below<WORDS>(ancestors, 32 * WORDS);
  const int chain = min(own + 1, start), position = own < start ? own : start + nodes - 1;
  const int late = min(max(position - recent_tokens + 1, 0), chain);
  const int kept = chain + nodes - max(late - first_tokens, 0);
  return {start, chain, first_tokens, late, kept, min(chain + nodes, kept + budget), ancestors};
}

// Whether a list is right; by a warp.
__device__ bool holds(const int* list, int held, const Promise& promise) {
  const int lane = threadIdx.x % 32;
  bool right = promise.wanted <= held;
  int keeps = 0;
  for (int i = lane; i < held; i += 32) {
    const int slot = list[i], before = i > 0 ? list[i - 1] : -1;
    if (i < promise.wanted) {
      right = right && slot > before && promise.sees(slot);
      keeps += slot < promise.first || slot >= promise.late;
    } else {
      right = right && slot == -1;
    }
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    keeps += __shfl_xor_sync(kAllLanes, keeps, distance);
  }
  return __all_sync(kAllLanes, right) && keeps == promise.kept;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    check_lists(const int* selected, const int* row_start, const int* row_slot,
                const int* tree_start, const int* ancestor_bits, const int* positions,
                const int* budget, int* checked, int* violations, int views, int held,
                int threshold, int first_tokens, int recent_tokens) {
  __shared__ int broken;
  pdl_launch_dependents();
  pdl_wait();
  const int b = blockIdx.x, first = row_start[b], rows = row_start[b + 1] - first;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, allowed = budget[b];
  if (threadIdx.x == 0) broken = 0;
  __syncthreads();
  for (int i = warp; i < rows * views; i += THREADS / 32) {
    const int row = first + i / views;
    const int* list = selected + (static_cast<int64_t>(first) * views + i) * held;
    bool right = true;
    if (allowed < 0 || positions[row] < threshold) {
      for (int at = lane; at < held; at += 32) right = right && list[at] == (at == 0 ? -2 : -1);
      right = __all_sync(kAllLanes, right);
    } else {
      const int* ancestors = ancestor_bits + static_cast<int64_t>(row) * WORDS;
      right = holds(list, held,
                    promise_of(row_slot[row], tree_start[b], allowed, ancestors, first_tokens,
                               recent_tokens));
    }
    if (lane == 0 && !right) atomicAdd(&broken, 1);
  }
  __syncthreads();
  const bool sound = broken == 0;
  if (threadIdx.x == 0) violations[b] = broken;
  const int64_t begin = static_cast<int64_t>(first) * views * held;
  for (int i = threadIdx.x; i < rows * views * held; i += THREADS) {
    checked[begin + i] = sound ? selected[begin + i] : i % held == 0 ? -2 : -1;
  }
}
