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
// A CTA per sequence, a warp per piece of a list: what a row sees and must keep is counted from
// where it stands, and each entry is held to the one in front of it. Four lists of 2150 are 34 kB
// to read and as many to write, a few µs.
#include "../_device/list_range.cuh"
#include "../_device/ptx.cuh"

constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr int kOfALane = 8, kPiece = 32 * kOfALane;

// What DsaIndexer may give a row: `wanted` slots, `kept` of them below `first` or from `late` on;
// where it gives a mark alone `wanted` is −1.
struct Promise {
  int start, chain, first, late, kept, wanted;
  const int* ancestors;

  __device__ __forceinline__ bool sees(int slot) const {
    if (slot < chain) return slot >= 0;
    const int node = slot - start;
    if (slot < start || node >= 32 * WORDS) return false;
    return static_cast<uint32_t>(ancestors[node / 32]) >> (node % 32) & 1u;
  }

  // Whether entry `at` may be `slot`, behind `before`.
  __device__ __forceinline__ bool allows(int at, int slot, int before) const {
    if (at < wanted) return slot > before && sees(slot);
    return slot == (wanted < 0 && at == 0 ? -2 : -1);
  }

  __device__ __forceinline__ bool keeps(int at, int slot) const {
    return at < wanted && (slot < first || slot >= late);
  }
};

__device__ __forceinline__ Promise promise_of(int own, int start, int budget, const int* ancestors,
                                              int first_tokens, int recent_tokens) {
  const ListRange range = list_range<WORDS>(own, start, ancestors, first_tokens, recent_tokens);
  const int seen = range.chain + range.nodes, kept = seen - range.others();
  return {start, range.chain, first_tokens, range.late, kept, min(seen, kept + budget), ancestors};
}

extern "C" __global__ void __launch_bounds__(THREADS)
    check_lists(const int* selected, const int* row_start, const int* row_slot,
                const int* tree_start, const int* ancestor_bits, const int* positions,
                const int* budget, int* checked, int* violations, int views, int held,
                int threshold, int first_tokens, int recent_tokens) {
  // Entries of each list that must stay; negative where one is wrong.
  DYNAMIC_SHARED(int, kept);
  __shared__ int broken;
  pdl_launch_dependents();
  pdl_wait();
  const int b = blockIdx.x, first = row_start[b], rows = row_start[b + 1] - first;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, allowed = budget[b];
  const int lists = rows * views, pieces = ceil_div(held, kPiece);
  const auto promised = [&](int index) {
    const int row = first + index / views;
    const int* ancestors = ancestor_bits + static_cast<int64_t>(row) * WORDS;
    if (allowed < 0 || positions[row] < threshold) return Promise{0, 0, 0, 0, 0, -1, ancestors};
    return promise_of(row_slot[row], tree_start[b], allowed, ancestors, first_tokens,
                      recent_tokens);
  };
  for (int i = threadIdx.x; i < lists; i += THREADS) kept[i] = 0;
  if (threadIdx.x == 0) broken = 0;
  __syncthreads();
  for (int i = warp; i < lists * pieces; i += THREADS / 32) {
    const int index = i / pieces, begin = i % pieces * kPiece + lane;
    const int* list = selected + (static_cast<int64_t>(first) * views + index) * held;
    int slots[kOfALane], before[kOfALane];
#pragma unroll
    for (int j = 0; j < kOfALane; ++j) {
      const int at = begin + 32 * j;
      slots[j] = at < held ? list[at] : -1;
      before[j] = at > 0 && at < held ? list[at - 1] : -1;
    }
    const Promise promise = promised(index);
    bool right = promise.wanted <= held;
    int keeps = 0;
#pragma unroll
    for (int j = 0; j < kOfALane; ++j) {
      const int at = begin + 32 * j;
      if (at >= held) continue;
      right = right && promise.allows(at, slots[j], before[j]);
      keeps += promise.keeps(at, slots[j]);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      keeps += __shfl_xor_sync(kAllLanes, keeps, distance);
    }
    right = __all_sync(kAllLanes, right);
    if (lane == 0) atomicAdd(&kept[index], right ? keeps : -2 * held - 1);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < lists; i += THREADS) {
    if (kept[i] != promised(i).kept) atomicAdd(&broken, 1);
  }
  __syncthreads();
  const bool sound = broken == 0;
  if (threadIdx.x == 0) violations[b] = broken;
  const int64_t begin = static_cast<int64_t>(first) * views * held;
#pragma unroll 4
  for (int i = threadIdx.x; i < lists * held; i += THREADS) {
    checked[begin + i] = sound ? selected[begin + i] : i % held == 0 ? -2 : -1;
  }
}
