// KvCommit: the entry of slot from_slot[i] is copied to to_slot[i], for pairs that are not padding.
//
//   pool       bf16 [pages, KV_HEADS, PAGE_SIZE, WIDTH], in and out
//   from_slot  i32  [PAIRS]   (sequences × path entries), negative = padding
//   to_slot    i32  [PAIRS]
//
// Grid: one CTA per KV head. A source slot may be the target of another pair, so the CTA reads all
// entries into shared memory before it writes.
#include "../_device/ptx.cuh"

CONFIG

namespace {

constexpr int kVectors = Config::kWidth / 8;  // of 16 bytes, in one head of a slot
static_assert(16 * Config::kPairs * kVectors == Config::kSharedBytes, "all pairs are staged");

__device__ __forceinline__ bool moves(int from, int to) {
  return from >= 0 && to >= 0 && from != to;
}

__device__ __forceinline__ int64_t vector_of(int slot, int head, int vector) {
  const int64_t page = slot / Config::kPageSize;
  return ((page * Config::kKvHeads + head) * Config::kPageSize + slot % Config::kPageSize) *
             kVectors +
         vector;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    commit_pairs(uint4* pool, const int* from_slot, const int* to_slot) {
  DYNAMIC_SHARED(uint4, staged);
  pdl_launch_dependents();
  pdl_wait();
  const int head = blockIdx.x;
  for (int i = threadIdx.x; i < Config::kPairs * kVectors; i += Config::kThreads) {
    const int from = from_slot[i / kVectors], to = to_slot[i / kVectors];
    if (moves(from, to)) staged[i] = pool[vector_of(from, head, i % kVectors)];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < Config::kPairs * kVectors; i += Config::kThreads) {
    const int from = from_slot[i / kVectors], to = to_slot[i / kVectors];
    if (moves(from, to)) pool[vector_of(to, head, i % kVectors)] = staged[i];
  }
}
