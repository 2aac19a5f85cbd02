// MlaAttention with lists of slots (DSA): gathers the latents of a row's list and rebuilds its
// keys.
//
//   selected       i32  [T, 1, held], rising, padded with −1
//   the rest       see kernel.cu; ROWS 1, LISTED 1
//
// The states of a row whose list starts with −2 are those of the previous launch. For GPT-OSS with
// a latent of 512, a row of 2116 entries takes 2.2 MB, as many bytes from L2 for each feature
// group, and 1.2 GFLOP. The weights of a CTA, 128 kB, are requested before griddepcontrol.wait.
#include "device/attend.cuh"

namespace {

// Return the number of entries of a list, by a warp: it searches for the first −1 in two steps.
__device__ __forceinline__ int entries_of(const int* list, int held) {
  const int lane = thread_index() % 32, stride = ceil_div(held, 32);
  const bool begins = lane * stride < held && list[lane * stride] >= 0;
  const int parts = __popc(__ballot_sync(kAllLanes, begins));
  if (parts == 0) return 0;
  const int from = (parts - 1) * stride, stop = min(from + stride, held);
  int entries = from;
  for (int at = from; at < stop; at += 32) {
    const bool real = at + lane < stop && list[at + lane] >= 0;
    entries += __popc(__ballot_sync(kAllLanes, real));
  }
  return entries;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attend_listed(const uint32_t* q, const uint4* c_pool, const uint4* w_k, const uint16_t* b_k,
                  const uint4* cos, const uint4* sin, const int* page_table, const int* row_start,
                  const int* row_slot, const int* tree_start, const int* ancestor_bits,
                  const int* selected, const int* page_position, float2* workspace_sums,
                  float* workspace_values, int held) {
  DYNAMIC_SHARED(unsigned char, shared);
  const Memory memory(shared);
  const Inputs in = INPUTS;
  const auto early = [&] { return static_cast<int>(blockIdx.x) <= held / kTile; };
  attend_sequence(in, memory, early, [&](LatentRows& rows, int first, int, int sequence) {
    const int* list = selected + static_cast<int64_t>(first) * held;
    if (list[0] == -2) return false;
    rows.open_list(first, in.rows, tree_start[sequence], list, entries_of(list, held));
    return true;
  });
}
