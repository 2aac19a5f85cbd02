// ViewSamples: one CTA. A thread counts the re-verified rows. Then there is a thread per row at
// which the target samples: rows of the trees, which are copied, and samples after them.
#include "../_device/ptx.cuh"

constexpr int kMaxSequences = 256;

extern "C" __global__ void __launch_bounds__(256, 1)
    view_samples(const int* row_token_ids,      // [T]
                 const int* row_positions,      // [T]
                 const int* row_start,          // [B + 1]
                 const int* logit_rows,         // [R], R = B·N1
                 const int* fed_again,          // [B]
                 const float* row_temperature,  // [R], like the next four
                 const int* row_top_k,          //
                 const float* row_top_p,        //
                 const int* row_seed,           //
                 const int* positions,          //
                 const float* row_floor,        // [R] or null
                 int* chosen_rows,              // out [R + samples], like the next five
                 float* temperature,            //
                 int* top_k,                    //
                 float* top_p,                  //
                 int* seed,                     //
                 int* position,                 //
                 int* sample_sequence,          // out [samples]
                 int* sample_token,             // out [samples]
                 float* floor,                  // out [R + samples]
                 int batch, int nodes, int samples) {
  // The number of re-verified rows of the sequences before each one.
  __shared__ int before[kMaxSequences + 1];
  pdl_launch_dependents();
  pdl_wait();
  if (threadIdx.x == 0) {
    int rows = 0;
    for (int b = 0; b < batch; ++b) {
      before[b] = rows;
      if (fed_again[b] != 0) rows += logit_rows[b * nodes] - row_start[b];
    }
    before[batch] = rows;
  }
  __syncthreads();
  const int rows = batch * nodes, chains = before[batch];
  for (int i = threadIdx.x; i < rows; i += blockDim.x) {
    chosen_rows[i] = logit_rows[i];
    temperature[i] = row_temperature[i];
    top_k[i] = row_top_k[i];
    top_p[i] = row_top_p[i];
    seed[i] = row_seed[i];
    position[i] = positions[i];
    floor[i] = row_floor == nullptr ? 0.0f : row_floor[i];
  }
  for (int j = threadIdx.x; j < samples; j += blockDim.x) {
    const int low = j * chains / samples, high = (j + 1) * chains / samples;
    int row = logit_rows[0], at = 0, token = 0, b = -1;
    if (low < high) {
      // The sequence of an entry of the chains, and its row.
      const auto row_of = [&](int entry) {
        b = 0;
        while (entry >= before[b + 1]) ++b;
        return row_start[b] + entry - before[b];
      };
      row = row_of(low + row_positions[row_of(low)] % (high - low));
      at = row_positions[row];
      token = row_token_ids[row + 1];
    }
    const int i = rows + j, root = b * nodes;
    chosen_rows[i] = row;
    temperature[i] = b < 0 ? 0.0f : row_temperature[root];
    top_k[i] = b < 0 ? 0 : row_top_k[root];
    top_p[i] = b < 0 ? 1.0f : row_top_p[root];
    seed[i] = b < 0 ? 0 : row_seed[root];
    position[i] = at;
    floor[i] = b < 0 || row_floor == nullptr ? 0.0f : row_floor[root];
    sample_sequence[j] = b;
    sample_token[j] = token;
  }
}
