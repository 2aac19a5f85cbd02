// TreeAccept: one warp a sequence walks from the root; a step looks at all slots at once.
#include "../_device/ptx.cuh"

extern "C" __global__ void __launch_bounds__(32)
    tree_accept(const int* tokens,         // [B, N + 1]
                const int* parents,        // [B, N + 1]
                const int* ancestor_bits,  // [B, N + 1, W]; not read, the walk follows the parents
                const int* count,          // [B]
                const int* choice,         // [B, N + 1]
                int* path,                 // out [B, D + 1]
                int* accepted,             // out [B]
                int* next_token,           // out [B]
                int nodes, int depth) {
  pdl_launch_dependents();
  pdl_wait();
  const int b = blockIdx.x, lane = threadIdx.x, first = b * nodes;
  const int used = min(count[b], nodes);
  int node = 0, steps = 0;
  if (lane == 0) path[b * (depth + 1)] = 0;
  while (steps < depth) {
    const int wanted = choice[first + node];
    int child = 0;
    // A child stands after its parent.
    for (int base = node / 32 * 32; base < used && child == 0; base += 32) {
      const int slot = base + lane;
      const bool matches = slot > node && slot < used && parents[first + slot] == node &&
                           tokens[first + slot] == wanted;
      const unsigned found = __ballot_sync(0xFFFFFFFFu, matches);
      if (found) child = base + __ffs(static_cast<int>(found)) - 1;
    }
    if (child == 0) break;
    node = child;
    ++steps;
    if (lane == 0) path[b * (depth + 1) + steps] = node;
  }
  for (int i = steps + 1 + lane; i <= depth; i += 32) path[b * (depth + 1) + i] = -1;
  if (lane == 0) {
    accepted[b] = steps;
    next_token[b] = choice[first + node];
  }
}
