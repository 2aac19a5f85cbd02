// DsaTally: one thread per sequence.
#include "../_device/ptx.cuh"

extern "C" __global__ void __launch_bounds__(128)
    tally_lists(const int* violations,  // [layers, batch]
                const int* step,        // [1]
                int* ring_broken,       // [slots, ring_batch], host memory, in and out
                int layers, int batch, int slots, int ring_batch) {
  pdl_launch_dependents();
  pdl_wait();
  const int b = blockIdx.x * blockDim.x + threadIdx.x;
  if (b >= batch) return;
  int broken = 0;
  for (int layer = 0; layer < layers; ++layer) broken += violations[layer * batch + b];
  ring_broken[step[0] % slots * ring_batch + b] = broken;
}
