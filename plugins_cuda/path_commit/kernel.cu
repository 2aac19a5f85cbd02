// PathCommit: in every part (a layer's keys or values), slot length + path[i] is copied to slot
// length + i.
//
//   pools       bf16 [parts, PAGES, KV_HEADS, PAGE_SIZE, WIDTH], in and out
//   path        i32  [B, DEPTH], -1 padded
//   length      i32  [B]
//   page_table  i32  [B, TABLE]
//
// Grid (parts, B). A source slot may be the target of another entry of the path, so a CTA reads all
// of them into shared memory before it writes. Sequences share no page.
#include "../_device/ptx.cuh"

CONFIG

namespace {

constexpr int kVectors = Config::kHeadBytes / 16;    // of 16 bytes, in one head of a slot
constexpr int kEntry = Config::kKvHeads * kVectors;  // vectors of a slot
constexpr int kTotal = Config::kDepth * kEntry;
static_assert(16 * kTotal == Config::kSharedBytes, "a path is staged completely");

// The index of a vector of a slot in this part's pool.
__device__ __forceinline__ int64_t vector_of(const int* table, int slot, int vector) {
  const int64_t page = table[slot / Config::kPageSize];
  const int head = vector / kVectors;
  return ((page * Config::kKvHeads + head) * Config::kPageSize + slot % Config::kPageSize) *
             kVectors +
         vector % kVectors;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    commit_paths(uint4* pools, const int* path, const int* length, const int* page_table) {
  DYNAMIC_SHARED(uint4, staged);
  pdl_launch_dependents();
  pdl_wait();
  uint4* pool = pools + static_cast<int64_t>(blockIdx.x) * Config::kPages * Config::kKvHeads *
                            Config::kPageSize * kVectors;
  const int* own_path = path + blockIdx.y * Config::kDepth;
  const int* table = page_table + blockIdx.y * Config::kTable;
  const int start = length[blockIdx.y];
  for (int i = threadIdx.x; i < kTotal; i += Config::kThreads) {
    const int place = i / kEntry, node = own_path[place];
    if (node >= 0 && node != place) staged[i] = pool[vector_of(table, start + node, i % kEntry)];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kTotal; i += Config::kThreads) {
    const int place = i / kEntry, node = own_path[place];
    if (node >= 0 && node != place) pool[vector_of(table, start + place, i % kEntry)] = staged[i];
  }
}
