// MlaAttention over lists of slots (DSA): latents of a row's list are gathered, its keys rebuilt.
//
//   selected       i32  [T, 1, held], rising, −1 behind the last
//   the rest       as kernel.cu's; ROWS 1, LISTED 1
//
// A row whose list begins with −2 is left as attend_whole_rows summed it. For GPT-OSS with a latent
// of 512 a row of 2116 entries takes 2.2 MB, and from L2 as many for each feature group, and 1.2
// GFLOP; the weights that every CTA takes in, 128 kB, are asked for before the wait.
#include "attend.cuh"

extern "C" __global__ void __launch_bounds__(kLatentThreads, 1)
    attend_listed(const uint32_t* q, const uint4* c_pool, const uint4* w_k, const uint16_t* b_k,
                  const uint4* cos, const uint4* sin, const int* page_table, const int* row_start,
                  const int* row_slot, const int* tree_start, const int* ancestor_bits,
                  const int* selected, const int* page_position, float2* workspace_sums,
                  float* workspace_values, int held) {
  DYNAMIC_SHARED(unsigned char, shared);
  const Memory memory(shared);
  pdl_launch_dependents();
  const auto opens = [&](LatentWalk& walk, int first, int) {
    const int* list = selected + static_cast<int64_t>(first) * held;
    __syncthreads();
    if (thread_index() == 0) *memory.guess = 0;
    __syncthreads();
    int own = 0;
    for (int i = thread_index(); i < held; i += kLatentThreads) own += list[i] >= 0;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      own += __shfl_xor_sync(kAllLanes, own, distance);
    }
    if (thread_index() % 32 == 0) atomicAdd(memory.guess, own);
    __syncthreads();
    if (list[0] == -2) return false;
    walk.rows.open_list(first, row_slot, tree_start[blockIdx.z / ROW_CTAS], ancestor_bits, list,
                        *memory.guess);
    return true;
  };
  attend_sequence(ARGUMENTS, memory, static_cast<int>(blockIdx.x) <= held / kTile, opens);
}
