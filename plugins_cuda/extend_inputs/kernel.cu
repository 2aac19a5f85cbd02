// ExtendInputs: one CTA per row that the draft ingests.
//
// A row moves C·2 bytes, 17 KB for three aux layers of GPT-OSS. There are two memory latencies: of
// the counts, which every warp adds itself, and of all data that depends on them.
#include "../_device/ptx_routing.cuh"
#include "../_device/step_rows.cuh"

// Sequences that a lane reads together.
constexpr int kAtOnce = 2;

extern "C" __global__ void __launch_bounds__(256, 1)
    extend_inputs(const int* length,              // [B]
                  const int* done,                // [B]
                  const int* pending_count,       // [B]
                  const int* pending_tokens,      // [B, DM1]
                  const uint4* pending_captured,  // [B, DM1, C] bf16, C = 8 · vectors
                  const int* page_table,          // [B, P]
                  const uint4* mask_captured,     // [C] bf16, or none
                  int* token_ids,                 // out [T], T = B·(DM1 + masks)
                  uint4* captured_rows,           // out [T, C] bf16
                  int* positions,                 // out [T]
                  int* row_start,                 // out [B + 1]
                  int* row_slot,                  // out [T]
                  int* write_slot,                // out [T]
                  int* tree_start,                // out [B]
                  int* ancestor_bits,             // out [T, 1]
                  int* logit_rows,                // out [B, 1 + masks]
                  float* score,                   // out [B, 1 + masks]
                  int batch, int capacity, int vectors, int pages, int page_size, int masks,
                  int mask_token) {
  pdl_launch_dependents();
  pdl_wait();
  const int row = blockIdx.x, lane = threadIdx.x % 32;
  // This row's sequence (or -1), its index there, the pending rows before it, and its position.
  int b = -1, place = 0, waiting = 0, position = 0;
  int rows = 0;  // of earlier sequences
#pragma unroll 1
  for (int first = 0; first < batch; first += 32 * kAtOnce) {
    int lengths[kAtOnce], counts[kAtOnce], are_done[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int other = min(first + 32 * n + lane, batch - 1);
      lengths[n] = load_l2_int(length + other);
      counts[n] = load_l2_int(pending_count + other);
      are_done[n] = load_l2_int(done + other);
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const bool lives = first + 32 * n + lane < batch && are_done[n] == 0;
      lengths[n] = lives ? lengths[n] + masks : 0;
      counts[n] = lives ? min(counts[n], capacity) + masks : 0;
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int other = first + 32 * n + lane;
      const int end = rows + warp_prefix_sum(counts[n]), begin = end - counts[n];
      if (row == 0 && threadIdx.x < 32 && other < batch) {
        if (other == 0) row_start[0] = 0;
        row_start[other + 1] = end;
        tree_start[other] = lengths[n];
#pragma unroll 1
        for (int level = 0; level <= masks; ++level) {
          logit_rows[other * (masks + 1) + level] = max(end - 1 - masks + level, 0);
          score[other * (masks + 1) + level] = 0.0f;
        }
      }
      const unsigned holds = __ballot_sync(kAllLanes, begin <= row && row < end);
      if (holds) {
        const int holder = __ffs(static_cast<int>(holds)) - 1;
        b = first + 32 * n + holder;
        place = row - __shfl_sync(kAllLanes, begin, holder);
        position = __shfl_sync(kAllLanes, lengths[n] - counts[n], holder) + place;
        waiting = __shfl_sync(kAllLanes, counts[n], holder) - masks;
      }
      rows = __shfl_sync(kAllLanes, end, 31);
    }
  }
  const bool live = b >= 0, masked = live && place >= waiting;
  const int64_t source = live && !masked ? static_cast<int64_t>(b) * capacity + place : 0;
  // All threads load them, so that no warp waits for another one before it copies.
  const int token = masked ? mask_token : live ? pending_tokens[source] : 0;
  const uint4* captured = masked ? mask_captured : pending_captured + source * vectors;
  const PoolSlot slot(page_table, pages, page_size, b, position, row, live);
  copy_row(captured_rows + static_cast<int64_t>(row) * vectors, live ? captured : nullptr, vectors);
  if (threadIdx.x == 0) {
    token_ids[row] = token;
    positions[row] = position;
    row_slot[row] = position;
    write_slot[row] = slot.place();
    ancestor_bits[row] = 0;
  }
}
