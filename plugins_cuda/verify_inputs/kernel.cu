// VerifyInputs: one thread a tree slot. Slots stand in order of depth, so those in use are a
// prefix.
#include "../_device/step_rows.cuh"

extern "C" __global__ void __launch_bounds__(128, 1)
    verify_inputs(const int* tree_tokens,         // [B, N1], null without a tree, as the next three
                  const int* depths,              // [B, N1]
                  const int* tree_bits,           // [B, N1, W]
                  const int* count,               // [B]
                  const int* length,              // [B]
                  const int* root,                // [B]
                  const int* done,                // [B]
                  const int* limit,               // [B]
                  const float* temperature,       // [B]
                  const int* top_k,               // [B]
                  const float* top_p,             // [B]
                  const int* seed,                // [B]
                  const int* page_table_full,     // [B, P_full] or null
                  const int* page_table_sliding,  // [B, P_sliding] or null
                  const int* page_table_latent,   // [B, P_latent] or null
                  const int* page_table_latent_sliding,  // [B, P_latent_sliding] or null
                  const int* page_table_indexer,         // [B, P_indexer] or null
                  int* token_ids,                        // out [T], T = B·N1
                  int* positions,                        // out [T]
                  int* row_start,                        // out [B + 1]
                  int* row_slot,                         // out [T]
                  int* tree_start,                       // out [B]
                  int* ancestor_bits,                    // out [T, W]
                  int* write_slot_full,                  // out [T]
                  int* write_slot_sliding,               // out [T]
                  int* write_slot_latent,                // out [T]
                  int* write_slot_latent_sliding,        // out [T]
                  int* write_slot_indexer,               // out [T]
                  int* logit_rows,                       // out [T]
                  float* row_temperature,                // out [T]
                  int* row_top_k,                        // out [T]
                  float* row_top_p,                      // out [T]
                  int* row_seed,                         // out [T]
                  int* tree_count,                       // out [B]
                  int batch, int nodes, int words, int pages_full, int pages_sliding,
                  int pages_latent, int pages_latent_sliding, int pages_indexer, int page_size) {
  pdl_launch_dependents();
  pdl_wait();
  if (blockIdx.x == 0) {
    write_even_row_start(row_start, batch, live_sequences(done, batch), nodes);
  }
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= batch * nodes) return;
  const int b = row / nodes, slot = row % nodes;
  const bool live = done[b] == 0;
  const int start = live ? length[b] : 0;
  const int deepest = limit[b] - length[b] - 2;
  const auto used = [&](int i) {
    if (i == 0) return live;
    return live && i < nodes && i < count[b] && depths[b * nodes + i] <= deepest;
  };
  const bool in_use = used(slot);
  int token = 0;
  if (in_use) token = slot == 0 ? root[b] : tree_tokens[row];
  token_ids[row] = token;
  positions[row] = start + (in_use && slot > 0 ? depths[row] : 0);
  row_slot[row] = start + slot;
  for (int word = 0; word < words; ++word) {
    unsigned bits = word == slot / 32 ? 1u << slot % 32 : 0u;
    if (live && tree_bits != nullptr) bits = tree_bits[row * words + word];
    ancestor_bits[row * words + word] = static_cast<int>(bits);
  }
  const auto place = [&](const int* table, int pages, int* write_slot) {
    if (table == nullptr) return;
    write_slot[row] = PoolSlot(table + static_cast<int64_t>(b) * pages, pages, page_size,
                               start + slot, row, in_use)
                          .place();
  };
  place(page_table_full, pages_full, write_slot_full);
  place(page_table_sliding, pages_sliding, write_slot_sliding);
  place(page_table_latent, pages_latent, write_slot_latent);
  place(page_table_latent_sliding, pages_latent_sliding, write_slot_latent_sliding);
  place(page_table_indexer, pages_indexer, write_slot_indexer);
  logit_rows[row] = row;
  row_temperature[row] = temperature[b];
  row_top_k[row] = top_k[b];
  row_top_p[row] = top_p[b];
  row_seed[row] = seed[b];
  if (slot == 0) {
    tree_start[b] = start;
    if (!live) tree_count[b] = 1;
  }
  if (in_use && !used(slot + 1)) tree_count[b] = slot + 1;
}
