// ChooseCut: the launches of Choose (choose/kernel.cu) that also read unrestricted rows, without
// these. cut_tails is that of Choose, because it does not read such rows.
#include "../_device/row_cut.cuh"
#include "../choose/device/choosing.cuh"

// Grid (parts, R), for both.
extern "C" __global__ void __launch_bounds__(kThreads)
    summarise_cut_parts(const float* logits,       // [R, V]
                        const float* temperature,  // [R]
                        const int* top_k,          // [R]
                        const float* top_p,        // [R]
                        const float* floor,        // [R] or null
                        uint64_t* workspace_best,  // out
                        float* workspace_sums,     // out
                        int vocab) {
  pdl_launch_dependents();
  pdl_wait();
  if (!RowCuts{temperature, top_k, top_p, floor}.of(blockIdx.y)) return;
  summarise_part(logits, workspace_best, workspace_sums, vocab);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    choose_cut(const float* logits,             // [R, V]
               const float* temperature,        // [R]
               const int* top_k,                // [R]
               const float* top_p,              // [R]
               const int* seed,                 // [R]
               const int* position,             // [R]
               const float* floor,              // [R] or null
               int* choice,                     // in and out [R]
               float* logprob,                  // in and out [R]
               const uint64_t* workspace_best,  // in
               const float* workspace_sums,     // in
               const int* workspace_kept,       // in
               uint64_t* workspace_noisy,       // out
               unsigned* workspace_arrived,     // the second half
               int vocab) {
  pdl_launch_dependents();
  pdl_wait();
  if (!RowCuts{temperature, top_k, top_p, floor}.of(blockIdx.y)) return;
  choose_of_part(logits, temperature, top_k, top_p, seed, position, floor, choice, logprob,
                 workspace_best, workspace_sums, workspace_kept, workspace_noisy, workspace_arrived,
                 vocab);
}
