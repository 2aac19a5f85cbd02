// KvWrite: row t of the new keys or values is written to slot write_slot[t].
//
//   pool        bf16 [pages, KV_HEADS, PAGE_SIZE, WIDTH], in and out
//   new         bf16 [ROWS, KV_HEADS, WIDTH]
//   write_slot  i32  [ROWS]
//
// One thread per 16 bytes of `new`. Slots are different, except for padding rows, which share page
// 0.
#include "../_device/ptx.cuh"

CONFIG

// The declared name of the tensor is a keyword of C++.
#define new new_rows

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    write_rows(uint4* pool, const uint4* new, const int* write_slot) {
  constexpr int kVectors = Config::kWidth / 8, kRow = Config::kKvHeads * kVectors;
  pdl_launch_dependents();
  pdl_wait();
  const int index = blockIdx.x * Config::kThreads + threadIdx.x;
  if (index >= Config::kRows * kRow) return;
  const int slot = write_slot[index / kRow], head = index % kRow / kVectors;
  const int64_t page = slot / Config::kPageSize;
  const int64_t entry =
      (page * Config::kKvHeads + head) * Config::kPageSize + slot % Config::kPageSize;
  pool[entry * kVectors + index % kVectors] = new[index];
}
