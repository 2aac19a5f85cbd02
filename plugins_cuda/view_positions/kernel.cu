// ViewPositions: a CTA writes the first position of each page of its sequence, then reads those of
// the pages of a layer's view. The CTAs of all layers write the same values to the same addresses,
// and each reads its own writes. With 131k tokens in pages of 16, a CTA needs 8 rounds for each.
#include "../_device/ptx.cuh"

CONFIG

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    view_positions(const int* page_table,   // [B, P]
                   const int* view_tables,  // [layers, B, kv_heads, P]
                   int* page_position,      // out [layers, B, P]
                   int* workspace_begins,   // [pages of the pool]
                   int heads, int pages, int page_size) {
  pdl_launch_dependents();
  pdl_wait();
  const int64_t place = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  const int* whole = page_table + static_cast<int64_t>(blockIdx.x) * pages;
  const int* seen = view_tables + place * heads * pages;
  for (int i = threadIdx.x; i < pages; i += Config::kThreads) {
    if (whole[i] != 0) workspace_begins[whole[i]] = i * page_size;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < pages; i += Config::kThreads) {
    page_position[place * pages + i] = seen[i] != 0 ? workspace_begins[seen[i]] : 0;
  }
}
