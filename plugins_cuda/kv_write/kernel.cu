// KvWrite: row t of the new keys or values goes to slot write_slot[t].
//
//   pool        bf16 [pages, KV_HEADS, PAGE_SIZE, WIDTH], in and out
//   new         bf16 [ROWS, KV_HEADS, WIDTH]
//   write_slot  i32  [ROWS]
//
// One thread per 16 bytes of `new`. Slots differ but for padding rows, which share page 0. No
// workspace.
#include "../_device/ptx.cuh"

// The tensor's declared name is a word that C++ keeps for itself.
#define new new_rows

extern "C" __global__ void __launch_bounds__(THREADS)
    write_rows(uint4* pool, const uint4* new, const int* write_slot) {
  constexpr int kVectors = WIDTH / 8, kRow = KV_HEADS * kVectors;
  pdl_launch_dependents();
  pdl_wait();
  const int index = blockIdx.x * THREADS + threadIdx.x;
  if (index >= ROWS * kRow) return;
  const int slot = write_slot[index / kRow], head = index % kRow / kVectors;
  const int64_t page = slot / PAGE_SIZE;
  const int64_t entry = (page * KV_HEADS + head) * PAGE_SIZE + slot % PAGE_SIZE;
  pool[entry * kVectors + index % kVectors] = new[index];
}
