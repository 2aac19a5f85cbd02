// LevelInputs: one CTA per node of the next frontier, and one more for row_start.
//
// CTA (b, j) writes row b·K + j, and appends the candidates of node j of the old frontier. Only
// this CTA reads the entry of frontier_pool that it overwrites. Its first warp computes everything
// but the hidden row, which the others copy. Both wait for memory twice: for the selected index,
// and for the data at that index.
#include "../_device/step_rows.cuh"

extern "C" __global__ void __launch_bounds__(256, 1)
    level_inputs(const int* tokens,       // [B, FK]
                 const float* scores,     // [B, FK]
                 const int* frontier,     // [B, K]
                 const uint4* hidden,     // [T0, H] bf16, H = 8 · vectors
                 const int* parent_rows,  // [B], null after level 1
                 const int* parent_bits,  // [B·K, W], null at level 1
                 const int* length,       // [B]
                 const int* done,         // [B]
                 const int* limit,        // [B]
                 const int* page_table,   // [B, P]
                 int* pool_tokens,        // in and out [B, M]
                 float* pool_scores,      // in and out [B, M]
                 int* pool_parents,       // in and out [B, M]
                 int* frontier_pool,      // in and out [B, K]
                 int* token_ids,          // out [T], T = B·K; null with last, as all that follow
                 uint4* hidden_rows,      // out [T, H] bf16
                 int* positions,          // out [T]
                 int* row_start,          // out [B + 1]
                 int* row_slot,           // out [T]
                 int* write_slot,         // out [T]
                 int* tree_start,         // out [B]
                 int* ancestor_bits,      // out [T, W]
                 int* logit_rows,         // out [T]
                 float* score,            // out [B, K]
                 int batch, int k, int candidates, int pool, int words, int vectors, int pages,
                 int page_size, int level, int last) {
  pdl_launch_dependents();
  const int row = blockIdx.x, b = row / k, j = row % k, lane = threadIdx.x % 32;
  const int offset = level == 1 ? 0 : k + (level - 2) * k * k;
  const int siblings = candidates / k;
  pdl_wait();
  if (b == batch) {
    if (threadIdx.x < 32) write_even_row_start(row_start, done, batch, k);
    return;
  }
  const int pick = load_l2_int(frontier + row);
  const bool live = load_l2_int(done + b) == 0;
  if (threadIdx.x >= 32) {
    if (last) return;
    const int parent_row = parent_rows == nullptr ? b * k + pick / k : load_l2_int(parent_rows + b);
    const Threads copying{static_cast<int>(threadIdx.x) - 32, static_cast<int>(blockDim.x) - 32};
    copy_row(hidden_rows + static_cast<int64_t>(row) * vectors,
             live ? hidden + static_cast<int64_t>(parent_row) * vectors : nullptr, vectors,
             copying);
    return;
  }

  const int committed = load_l2_int(length + b), max_length = load_l2_int(limit + b);
  const int parent = level == 1 ? -1 : load_l2_int(frontier_pool + row);
#pragma unroll 1
  for (int i = lane; i < siblings; i += 32) {
    const int from = b * candidates + j * siblings + i;
    const int to = b * pool + offset + j * siblings + i;
    const int token = load_l2_int(tokens + from);
    const float of_token = load_l2_float(scores + from);
    pool_tokens[to] = token;
    pool_scores[to] = of_token;
    pool_parents[to] = parent;
  }
  __syncwarp();
  if (lane == 0) frontier_pool[row] = offset + pick;
  if (last) return;

  const int node = b * k + pick / k;
  const int own = (level - 1) * k + j;
  const int start = live ? committed : 0;
  const int token = load_l2_int(tokens + b * candidates + pick);
  const float of_token = load_l2_float(scores + b * candidates + pick);
  const PoolSlot slot(page_table, pages, page_size, b, start + own, row, live);
#pragma unroll 1
  for (int word = lane; word < words; word += 32) {
    unsigned bits = word == own / 32 ? 1u << own % 32 : 0u;
    if (live && parent_bits != nullptr) bits |= load_l2_int(parent_bits + node * words + word);
    ancestor_bits[row * words + word] = static_cast<int>(bits);
  }
  if (lane == 0) {
    token_ids[row] = live ? token : 0;
    positions[row] = live ? min(committed + level - 1, max_length - 1) : 0;
    row_slot[row] = start + own;
    write_slot[row] = slot.place();
    logit_rows[row] = row;
    score[row] = of_token;
    if (j == 0) tree_start[b] = start;
  }
}
