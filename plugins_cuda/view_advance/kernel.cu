// ViewAdvance: one thread per sequence, with a few tokens each.
#include "../_device/ptx.cuh"

extern "C" __global__ void __launch_bounds__(128, 1)
    view_advance(const int* token_ids,  // [R], R = B·N1
                 const int* positions,  // [R]
                 const int* path,       // [B, D1] or null
                 const int* length,     // [B]
                 const int* done,       // [B]
                 const int* fed_again,  // [B]
                 const int* blocks,     // [B]
                 int* verified_len,     // [B], in and out, like the next two
                 int* view_blocks,      // [B]
                 int* summarised,       // [B]
                 int* buffered_tokens,  // [B, F], in and out
                 int batch, int nodes, int depth, int buffer) {
  pdl_launch_dependents();
  pdl_wait();
  const int b = blockIdx.x * blockDim.x + threadIdx.x;
  if (b >= batch || done[b] != 0) return;
  const int start = positions[b * nodes];
  for (int i = 0; i < min(length[b] - start, depth); ++i) {
    const int slot = path == nullptr ? 0 : path[b * depth + i];
    buffered_tokens[static_cast<int64_t>(b) * buffer + (start + i) % buffer] =
        token_ids[b * nodes + slot];
  }
  if (fed_again[b] != 0) {
    verified_len[b] = length[b];
    view_blocks[b] = blocks[b];
    summarised[b] = max(summarised[b], blocks[b]);
  }
}
