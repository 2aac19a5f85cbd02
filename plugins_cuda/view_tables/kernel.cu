// ViewTables: a CTA copies one table. At 131k tokens, a full view takes 3 MB for 12 layers of 8 KV
// heads, less than a microsecond; a partial one takes 0.1 MB.
#include "../_device/ptx.cuh"

CONFIG

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    view_tables(const int* page_table,      // [B, P]
                const int* partial_tables,  // [layers, BM, kv_heads, V]
                const int* viewed,          // [B]
                int* view_tables,           // out [layers, B, kv_heads, P]
                int max_sequences, int pages, int entries) {
  pdl_launch_dependents();
  pdl_wait();
  const int b = blockIdx.x, head = blockIdx.y, layer = blockIdx.z;
  const int64_t heads = gridDim.y;
  const int* partial =
      partial_tables + ((layer * static_cast<int64_t>(max_sequences) + b) * heads + head) * entries;
  const int* whole = page_table + static_cast<int64_t>(b) * pages;
  int* out = view_tables + ((layer * static_cast<int64_t>(gridDim.x) + b) * heads + head) * pages;
  const bool views = viewed[b] != 0;
  for (int i = threadIdx.x; i < pages; i += Config::kThreads) {
    out[i] = views ? (i < entries ? partial[i] : 0) : whole[i];
  }
}
