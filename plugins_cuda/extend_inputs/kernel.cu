// ExtendInputs: one CTA a row of the draft's extension.
//
// Moves C·2 bytes a row, 17 KB at GPT-OSS's three taps. Every CTA sums the counts of all sequences
// itself: they are a few hundred bytes.
#include "../_device/step_rows.cuh"

extern "C" __global__ void __launch_bounds__(128, 1)
    extend_inputs(const int* length,              // [B]
                  const int* done,                // [B]
                  const int* pending_count,       // [B]
                  const int* pending_tokens,      // [B, DM1]
                  const uint4* pending_captured,  // [B, DM1, C] bf16, C = 8 · vectors
                  const int* page_table,          // [B, P]
                  int* token_ids,                 // out [T], T = B·DM1
                  uint4* captured_rows,           // out [T, C] bf16
                  int* positions,                 // out [T]
                  int* row_start,                 // out [B + 1]
                  int* row_slot,                  // out [T]
                  int* write_slot,                // out [T]
                  int* tree_start,                // out [B]
                  int* ancestor_bits,             // out [T, 1]
                  int* logit_rows,                // out [B]
                  float* score,                   // out [B, 1]
                  int batch, int room, int vectors, int pages, int page_size) {
  DYNAMIC_SHARED(int, counts);  // [B]
  __shared__ int own[2];        // this row's sequence, or -1, and its place there
  pdl_launch_dependents();
  pdl_wait();
  const int row = blockIdx.x;
  for (int b = threadIdx.x; b < batch; b += blockDim.x) {
    counts[b] = done[b] ? 0 : min(pending_count[b], room);
  }
  if (threadIdx.x == 0) own[0] = -1;
  __syncthreads();
  for (int b = threadIdx.x; b < batch; b += blockDim.x) {
    int first = 0;
    for (int before = 0; before < b; ++before) first += counts[before];
    const int end = first + counts[b];
    if (first <= row && row < end) {
      own[0] = b;
      own[1] = row - first;
    }
    if (row == 0) {
      if (b == 0) row_start[0] = 0;
      row_start[b + 1] = end;
      tree_start[b] = done[b] ? 0 : length[b];
      logit_rows[b] = max(end - 1, 0);
      score[b] = 0.0f;
    }
  }
  __syncthreads();
  const int b = own[0], place = own[1];
  const bool live = b >= 0;
  if (threadIdx.x == 0) {
    const int position = live ? length[b] - counts[b] + place : 0;
    const int* table = live ? page_table + static_cast<int64_t>(b) * pages : nullptr;
    token_ids[row] = live ? pending_tokens[b * room + place] : 0;
    positions[row] = position;
    row_slot[row] = position;
    write_slot[row] = pool_slot(table, pages, page_size, position, row, live);
    ancestor_bits[row] = 0;
  }
  const int64_t source = live ? (static_cast<int64_t>(b) * room + place) * vectors : 0;
  copy_row(captured_rows + static_cast<int64_t>(row) * vectors,
           live ? pending_captured + source : nullptr, vectors);
}
