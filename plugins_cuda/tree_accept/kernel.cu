// TreeAccept: one warp per sequence walks from the root; a step compares all slots at once.
//
// There is one memory latency: the required data of a tree is in shared memory before the walk.
#include "../_device/staged_words.cuh"

extern "C" __global__ void __launch_bounds__(32)
    tree_accept(const int* tokens,         // [B, N + 1]
                const int* parents,        // [B, N + 1]
                const int* ancestor_bits,  // [B, N + 1, W]; not read, the walk follows the parents
                const int* count,          // [B]
                const int* choice,         // [B, N + 1], or [T] with row_start
                const int* row_start,      // [B + 1], or null: N + 1 rows each
                int* path,                 // out [B, D + 1]
                int* accepted,             // out [B]
                int* next_token,           // out [B]
                int nodes, int depth) {
  DYNAMIC_SHARED(int, chosen);       // [N + 1]: the target's choice at a slot
  int* const from = chosen + nodes;  // [N + 1]: the matching parent of a slot, or −1
  int* const token = from + nodes;   // [N + 1]
  pdl_launch_dependents();
  pdl_wait();
  const int b = blockIdx.x, lane = threadIdx.x, first = b * nodes;
  const int used = min(load_l2_int(count + b), nodes);
  int row = first, rows = nodes;
  if (row_start != nullptr) {
    row = load_l2_int(row_start + b);
    rows = min(load_l2_int(row_start + b + 1) - row, nodes);
    if (rows == 0 && lane == 0) chosen[0] = 0;
  }
  stage_words(chosen, choice + row, rows);
  stage_words(from, parents + first, nodes);
  stage_words(token, tokens + first, nodes);
  wait_for_staged();
#pragma unroll 1
  for (int slot = lane; slot < nodes; slot += 32) {
    const int parent = from[slot];
    // A child has a higher slot than its parent.
    const bool child = slot < used && parent >= 0 && parent < slot;
    if (!child || chosen[parent] != token[slot]) from[slot] = -1;
  }
  __syncwarp();
  int node = 0, steps = 0;
  if (lane == 0) path[b * (depth + 1)] = 0;
#pragma unroll 1
  while (steps < depth) {
    int child = 0;
#pragma unroll 1
    for (int base = node / 32 * 32; base < nodes && child == 0; base += 32) {
      const int slot = base + lane;
      const unsigned matches = __ballot_sync(kAllLanes, slot < nodes && from[slot] == node);
      if (matches) child = base + __ffs(static_cast<int>(matches)) - 1;
    }
    if (child == 0) break;
    node = child;
    ++steps;
    if (lane == 0) path[b * (depth + 1) + steps] = node;
  }
#pragma unroll 1
  for (int i = steps + 1 + lane; i <= depth; i += 32) path[b * (depth + 1) + i] = -1;
  if (lane == 0) {
    accepted[b] = steps;
    next_token[b] = chosen[node];
  }
}
