// ViewInputs: one thread per row of the step. The first row of a sequence depends on the
// re-verified tokens of earlier ones: one thread of every CTA counts them, in a few steps per
// sequence.
#include "../_device/step_rows.cuh"

constexpr int kMaxSequences = 256;

extern "C" __global__ void __launch_bounds__(128, 1)
    view_inputs(const int* token_ids,           // [R], R = B·N1
                const int* positions,           // [R]
                const int* ancestor_bits,       // [R, W]
                const int* write_slot_full,     // [R]
                const int* write_slot_sliding,  // [R] or null
                const int* tree_count,          // [B]
                const int* done,                // [B]
                const int* full_step,           // [B]
                const int* verified_len,        // [B]
                const int* view_blocks,         // [B]
                const int* budget,              // [B]
                const int* buffered_tokens,     // [B, F]
                const int* page_table_full,     // [B, P_full]
                const int* page_table_sliding,  // [B, P_sliding] or null
                int* row_token_ids,             // out [T], T = R + room
                int* row_positions,             // out [T]
                int* row_start,                 // out [B + 1]
                int* row_slot,                  // out [T]
                int* view_slot,                 // out [T]
                int* tree_start,                // out [B]
                int* view_start,                // out [B]
                int* row_bits,                  // out [T, W]
                int* row_write_full,            // out [T]
                int* row_write_sliding,         // out [T] or null
                int* logit_rows,                // out [R]
                int* fed_again,                 // out [B]
                int* viewed,                    // out [B]
                int* blocks,                    // out [B]
                int batch, int nodes, int words, int buffer, int pages_full, int pages_sliding,
                int page_size, int block_size, int sink_tokens, int window_blocks, int threshold,
                int room) {
  // First row of a sequence, number of re-verified tokens, and tokens outside of its view.
  __shared__ int first[kMaxSequences + 1], chain[kMaxSequences], hidden[kMaxSequences];
  pdl_launch_dependents();
  pdl_wait();
  const int live = live_sequences(done, batch);
  if (threadIdx.x == 0) {
    int row = 0, left = room;
    for (int b = 0; b < batch; ++b) {
      const int length = positions[b * nodes], again = length - verified_len[b];
      const bool alive = done[b] == 0;
      const bool full = alive && full_step[b] != 0 && again >= 0 && again <= left;
      const bool views = alive && !full && view_blocks[b] >= 0;
      first[b] = row;
      chain[b] = full ? again : 0;
      hidden[b] = views ? (view_blocks[b] - min(budget[b], view_blocks[b])) * block_size : 0;
      left -= chain[b];
      row += chain[b] + nodes;
      if (blockIdx.x == 0) {
        row_start[b] = b < live ? first[b] : first[live];
        tree_start[b] = length;
        view_start[b] = length - hidden[b];
        fed_again[b] = full;
        viewed[b] = views;
        const int whole = max(0, length - sink_tokens) / block_size - window_blocks;
        blocks[b] = full && length > threshold ? max(0, whole) : -1;
      }
    }
    first[batch] = row;
    if (blockIdx.x == 0) row_start[batch] = first[live];
  }
  __syncthreads();
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= batch * nodes + room) return;
  int b = 0;
  while (b < batch && row >= first[b + 1]) ++b;
  int token = 0, position = 0, slot = 0, view = 0, source = -1;
  int to_full = row % page_size, to_sliding = row % page_size;
  if (b < batch) {
    const int at = row - first[b], length = positions[b * nodes];
    if (at < chain[b]) {
      position = slot = view = verified_len[b] + at;
      token = buffered_tokens[static_cast<int64_t>(b) * buffer + position % buffer];
      to_full = PoolSlot(page_table_full, pages_full, page_size, b, position, row, true).place();
      to_sliding =
          PoolSlot(page_table_sliding, pages_sliding, page_size, b, position, row, true).place();
    } else {
      const int node = at - chain[b];
      source = b * nodes + node;
      token = token_ids[source];
      position = positions[source];
      slot = length + node;
      view = slot - hidden[b];
      logit_rows[source] = row;
      if (done[b] == 0 && node < tree_count[b]) {
        to_full = write_slot_full[source];
        if (write_slot_sliding != nullptr) to_sliding = write_slot_sliding[source];
      }
    }
  }
  row_token_ids[row] = token;
  row_positions[row] = position;
  row_slot[row] = slot;
  view_slot[row] = view;
  row_write_full[row] = to_full;
  if (row_write_sliding != nullptr) row_write_sliding[row] = to_sliding;
  for (int word = 0; word < words; ++word) {
    row_bits[row * words + word] = source < 0 ? 0 : ancestor_bits[source * words + word];
  }
}
