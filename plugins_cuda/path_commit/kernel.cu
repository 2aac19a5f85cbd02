// PathCommit: in every part (one layer's keys or values) slot length + path[i] goes to length + i.
//
//   pools       bf16 [parts, PAGES, KV_HEADS, PAGE_SIZE, WIDTH], in and out
//   path        i32  [B, DEPTH], -1 padded
//   length      i32  [B]
//   page_table  i32  [B, TABLE]
//
// Grid (parts, B). Sources may be targets of other entries of the path: a CTA reads all of them
// into shared memory before it writes any. Sequences share no page. No workspace.
#include "../_device/ptx.cuh"

namespace {

constexpr int kVectors = HEAD_BYTES / 16;    // of 16 bytes, in one head of a slot
constexpr int kEntry = KV_HEADS * kVectors;  // vectors of a slot
constexpr int kTotal = DEPTH * kEntry;

// The vector of a slot in this part's pool.
__device__ __forceinline__ int64_t vector_of(const int* table, int slot, int vector) {
  const int64_t page = table[slot / PAGE_SIZE];
  const int head = vector / kVectors;
  return ((page * KV_HEADS + head) * PAGE_SIZE + slot % PAGE_SIZE) * kVectors + vector % kVectors;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    commit_paths(uint4* pools, const int* path, const int* length, const int* page_table) {
  DYNAMIC_SHARED(uint4, staged);
  pdl_launch_dependents();
  pdl_wait();
  uint4* pool = pools + static_cast<int64_t>(blockIdx.x) * PAGES * KV_HEADS * PAGE_SIZE * kVectors;
  const int* own_path = path + blockIdx.y * DEPTH;
  const int* table = page_table + blockIdx.y * TABLE;
  const int start = length[blockIdx.y];
  for (int i = threadIdx.x; i < kTotal; i += THREADS) {
    const int place = i / kEntry, node = own_path[place];
    if (node >= 0 && node != place) staged[i] = pool[vector_of(table, start + node, i % kEntry)];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kTotal; i += THREADS) {
    const int place = i / kEntry, node = own_path[place];
    if (node >= 0 && node != place) pool[vector_of(table, start + place, i % kEntry)] = staged[i];
  }
}
