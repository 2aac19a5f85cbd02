// ViewTally: one thread per sequence reads every sample; there are only a few.
#include "../_device/ptx.cuh"

extern "C" __global__ void __launch_bounds__(128)
    view_tally(const int* choice,           // [rows]; the samples' are the last
               const int* sample_sequence,  // [samples], -1: none
               const int* sample_token,     // [samples]
               const int* fed_again,        // [batch]
               const int* step,             // [1]
               int* ring_rechecked,         // [slots, ring_batch], host memory, in and out
               int* ring_agreed,            // [slots, ring_batch], the same
               int rows, int samples, int batch, int slots, int ring_batch) {
  pdl_launch_dependents();
  pdl_wait();
  const int b = blockIdx.x * blockDim.x + threadIdx.x;
  if (b >= batch) return;
  int rechecked = 0, agreed = 0;
  for (int j = 0; j < samples && fed_again[b] != 0; ++j) {
    if (sample_sequence[j] != b) continue;
    ++rechecked;
    agreed += choice[rows - samples + j] == sample_token[j];
  }
  const int entry = step[0] % slots * ring_batch + b;
  ring_rechecked[entry] = rechecked;
  ring_agreed[entry] = agreed;
}
