// LevelInputs: one CTA a node of the next frontier.
//
// CTA (b, j) writes row b·K + j and appends the candidates of the old frontier's node j: nobody
// else reads the entry of frontier_pool that it replaces.
#include "../_device/step_rows.cuh"

extern "C" __global__ void __launch_bounds__(128, 1)
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
  pdl_wait();
  const int row = blockIdx.x, b = row / k, j = row % k;
  const int offset = level == 1 ? 0 : k + (level - 2) * k * k;
  const int siblings = candidates / k;
  const int parent = level == 1 ? -1 : frontier_pool[row];
  for (int i = threadIdx.x; i < siblings; i += blockDim.x) {
    const int from = b * candidates + j * siblings + i;
    const int to = b * pool + offset + j * siblings + i;
    pool_tokens[to] = tokens[from];
    pool_scores[to] = scores[from];
    pool_parents[to] = parent;
  }
  __syncthreads();
  const int pick = frontier[row];
  if (threadIdx.x == 0) frontier_pool[row] = offset + pick;
  if (last) return;

  const bool live = done[b] == 0;
  const int node = b * k + pick / k;
  const int own = (level - 1) * k + j;
  const int slot = own + (live ? length[b] : 0);
  if (threadIdx.x == 0) {
    token_ids[row] = live ? tokens[b * candidates + pick] : 0;
    positions[row] = live ? min(length[b] + level - 1, limit[b] - 1) : 0;
    row_slot[row] = slot;
    write_slot[row] = PoolSlot(page_table, pages, page_size, b, slot, row, live).place();
    logit_rows[row] = row;
    score[row] = scores[b * candidates + pick];
    if (j == 0) tree_start[b] = live ? length[b] : 0;
  }
  for (int word = threadIdx.x; word < words; word += blockDim.x) {
    unsigned bits = word == own / 32 ? 1u << own % 32 : 0u;
    if (live && parent_bits != nullptr) bits |= parent_bits[node * words + word];
    ancestor_bits[row * words + word] = static_cast<int>(bits);
  }
  const int64_t source = live ? (parent_rows == nullptr ? node : parent_rows[b]) : 0;
  copy_row(hidden_rows + static_cast<int64_t>(row) * vectors,
           live ? hidden + source * vectors : nullptr, vectors);
  if (row == 0 && threadIdx.x < 32) write_even_row_start(row_start, done, batch, k);
}
