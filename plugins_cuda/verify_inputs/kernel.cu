// VerifyInputs: one thread per row, and one more CTA for data of sequences. Slots are in order of
// depth, so the used slots of a tree are a prefix.
//
// There are two memory latencies: of the state and the tree, and of the pages that depend on them.
// If sequences have different numbers of rows, the latency of these numbers comes first.
#include "../_device/step_rows.cuh"

constexpr int kMaxSequences = 256;  // the value of lowering.py

namespace {

// One warp writes starts [batch + 1] of rows: each sequence that is not done has row_count rows, of
// ``rows`` in total.
__device__ inline void sum_row_counts(int* starts, const int* row_count, const int* done, int batch,
                                      int rows) {
  const int lane = threadIdx.x % 32;
  int before = 0;
  if (lane == 0) starts[0] = 0;
#pragma unroll 1
  for (int first = 0; first < batch; first += 32) {
    const int b = first + lane, at = min(b, batch - 1);
    const int is_done = load_l2_int(done + at), of_b = load_l2_int(row_count + at);
    int sum = b < batch && is_done == 0 ? of_b : 0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kAllLanes, sum, step);
      if (lane >= step) sum += other;
    }
    if (b < batch) starts[b + 1] = min(before + sum, rows);
    before += __shfl_sync(kAllLanes, sum, 31);
  }
}

// Return the sequence of a row; ``batch`` after the last sequence.
__device__ inline int sequence_of(int row, const int* starts, int batch) {
  int low = 0, high = batch;
#pragma unroll 1
  while (low < high) {
    const int middle = (low + high) / 2;
    if (starts[middle + 1] <= row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(128, 1)
    verify_inputs(const int* tree_tokens,      // [B, N1], null without a tree, like the next three
                  const int* depths,           // [B, N1]
                  const int* tree_bits,        // [B, N1, W]
                  const int* count,            // [B]
                  const int* length,           // [B]
                  const int* root,             // [B]
                  const int* done,             // [B]
                  const int* limit,            // [B]
                  const float* temperature,    // [B]
                  const int* top_k,            // [B]
                  const float* top_p,          // [B]
                  const int* seed,             // [B]
                  const int* page_table_full,  // [B, P_full] or null
                  const int* page_table_sliding,         // [B, P_sliding] or null
                  const int* page_table_latent,          // [B, P_latent] or null
                  const int* page_table_latent_sliding,  // [B, P_latent_sliding] or null
                  const int* page_table_indexer,         // [B, P_indexer] or null
                  const float* floor,                    // [B] or null
                  const int* row_count,                  // [B], or null: N1 rows each, T = B·N1
                  int* token_ids,                        // out [T]
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
                  float* row_floor,                      // out [T]
                  int batch, int rows, int nodes, int words, int pages_full, int pages_sliding,
                  int pages_latent, int pages_latent_sliding, int pages_indexer, int page_size) {
  __shared__ int starts[kMaxSequences + 1];
  pdl_launch_dependents();
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  const bool ragged = row_count != nullptr;
  int of_row = row / nodes, slot = row % nodes, own_rows = nodes;
  pdl_wait();
  if (ragged) {
    if (threadIdx.x < 32) sum_row_counts(starts, row_count, done, batch, rows);
    __syncthreads();
  }
  if (blockIdx.x == gridDim.x - 1) {
    if (!ragged) {
      if (threadIdx.x < 32) write_even_row_start(row_start, done, batch, nodes);
      return;
    }
    for (int b = threadIdx.x; b <= batch; b += blockDim.x) {
      row_start[b] = starts[b];
      if (b == batch || starts[b] < starts[b + 1]) continue;
      tree_start[b] = 0;
      tree_count[b] = 1;
    }
    return;
  }
  if (row >= rows) return;
  if (ragged) {
    of_row = sequence_of(row, starts, batch);
    slot = of_row < batch ? row - starts[of_row] : 0;
    own_rows = of_row < batch ? starts[of_row + 1] - starts[of_row] : 0;
  }
  // Padding after the rows of the last sequence belongs to no sequence.
  const bool of_none = of_row == batch;
  const int b = of_none ? 0 : of_row, place = b * nodes + slot;
  const bool live = load_l2_int(done + b) == 0 && !of_none;
  const int committed = load_l2_int(length + b), max_length = load_l2_int(limit + b);
  const int root_token = load_l2_int(root + b);
  const float of_temperature = load_l2_float(temperature + b), of_top_p = load_l2_float(top_p + b);
  const int of_top_k = load_l2_int(top_k + b), of_seed = load_l2_int(seed + b);
  const float of_floor = floor == nullptr ? 0.0f : load_l2_float(floor + b);
  int slots = 0, tree_token = 0, depth = 0, next_depth = 0, first_bits = 0;
  if (tree_tokens != nullptr) {
    slots = load_l2_int(count + b);
    tree_token = load_l2_int(tree_tokens + place);
    depth = load_l2_int(depths + place);
    next_depth = load_l2_int(depths + min(place + 1, batch * nodes - 1));
    first_bits = load_l2_int(tree_bits + static_cast<int64_t>(place) * words);
  }

  const int start = live ? committed : 0;
  const int deepest = max_length - committed - 2;
  const auto used = [&](int i, int depth_of_i) {
    return live && (i == 0 || (i < min(own_rows, slots) && depth_of_i <= deepest));
  };
  const bool in_use = used(slot, depth);
  const PoolSlot full(page_table_full, pages_full, page_size, b, start + slot, row, in_use);
  const PoolSlot sliding(page_table_sliding, pages_sliding, page_size, b, start + slot, row,
                         in_use);
  const PoolSlot latent(page_table_latent, pages_latent, page_size, b, start + slot, row, in_use);
  const PoolSlot latent_sliding(page_table_latent_sliding, pages_latent_sliding, page_size, b,
                                start + slot, row, in_use);
  const PoolSlot indexer(page_table_indexer, pages_indexer, page_size, b, start + slot, row,
                         in_use);

  token_ids[row] = !in_use ? 0 : slot == 0 ? root_token : tree_token;
  positions[row] = start + (in_use && slot > 0 ? depth : 0);
  row_slot[row] = start + slot;
#pragma unroll 1
  for (int word = 0; word < words; ++word) {
    unsigned bits = word == slot / 32 ? 1u << slot % 32 : 0u;
    if (live && tree_bits != nullptr) {
      bits = word == 0 ? first_bits : tree_bits[static_cast<int64_t>(place) * words + word];
    }
    ancestor_bits[static_cast<int64_t>(row) * words + word] = static_cast<int>(bits);
  }
  logit_rows[row] = row;
  row_temperature[row] = of_none ? 0.0f : of_temperature;
  row_top_k[row] = of_none ? 0 : of_top_k;
  row_top_p[row] = of_none ? 1.0f : of_top_p;
  row_seed[row] = of_none ? 0 : of_seed;
  row_floor[row] = of_none ? 0.0f : of_floor;
  if (slot == 0 && !of_none) {
    tree_start[b] = start;
    if (!live) tree_count[b] = 1;
  }
  if (in_use && !used(slot + 1, next_depth)) tree_count[b] = slot + 1;
  if (page_table_full != nullptr) write_slot_full[row] = full.place();
  if (page_table_sliding != nullptr) write_slot_sliding[row] = sliding.place();
  if (page_table_latent != nullptr) write_slot_latent[row] = latent.place();
  if (page_table_latent_sliding != nullptr) write_slot_latent_sliding[row] = latent_sliding.place();
  if (page_table_indexer != nullptr) write_slot_indexer[row] = indexer.place();
}
