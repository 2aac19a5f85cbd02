// DsaCompare: one thread per sequence; a path has a few slots.
#include "../_device/ptx.cuh"

constexpr int kFields = 5;

extern "C" __global__ void __launch_bounds__(128)
    compare_choices(const int* sampled,           // [T], T = B·N1: of the sparse pass
                    const int* choice,            // [T]: of the full pass
                    const int* path,              // [B, D1], or null like the next two: the root
                    const int* accepted,          // [B]
                    const int* sampled_accepted,  // [B]
                    const int* violations,        // [layers, B], of the sparse pass
                    const int* step,              // [1]
                    int* ring_checks,             // [slots, ring_batch, 5], host memory, in and out
                    int batch, int nodes, int path_width, int layers, int slots, int ring_batch) {
  pdl_launch_dependents();
  pdl_wait();
  const int b = blockIdx.x * blockDim.x + threadIdx.x;
  if (b >= batch) return;
  const int drafts = path == nullptr ? 0 : accepted[b];
  int agreed = 0, broken = 0;
  for (int i = 0; i <= drafts; ++i) {
    const int row = b * nodes + (path == nullptr ? 0 : path[b * path_width + i]);
    agreed += sampled[row] == choice[row];
  }
  for (int layer = 0; layer < layers; ++layer) broken += violations[layer * batch + b];
  int* entry = ring_checks + (step[0] % slots * ring_batch + b) * kFields;
  entry[0] = drafts + 1;
  entry[1] = agreed;
  entry[2] = drafts;
  entry[3] = path == nullptr ? 0 : sampled_accepted[b];
  entry[4] = broken;
}
