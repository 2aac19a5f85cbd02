// MlaAttention where rows have lists of slots (DSA): those whose list stands for everything.
//
//   selected       i32  [T, 1, held]; a list that begins with −2 stands for all that a row sees
//   the rest       as kernel.cu's
//
// A CTA none of whose rows has such a list leaves them alone; any other is the plain kernel's CTA,
// so that these rows get its bits. What it sums of rows with other lists, attend_listed replaces.
#include "device/attend.cuh"
#include "device/config.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attend_whole_rows(const uint32_t* q, const uint4* c_pool, const uint4* w_k, const uint16_t* b_k,
                      const uint4* cos, const uint4* sin, const int* page_table,
                      const int* row_start, const int* row_slot, const int* tree_start,
                      const int* ancestor_bits, const int* selected, const int* page_position,
                      float2* workspace_sums, float* workspace_values, int held) {
  DYNAMIC_SHARED(unsigned char, shared);
  const Memory memory(shared);
  const Inputs in = INPUTS;
  // Most launches have no such row.
  const auto early = [] { return false; };
  attend_sequence(in, memory, early, [&](LatentRows& rows, int first, int count, int sequence) {
    // Of rows that are left alone too: their spans would otherwise be held in registers twice.
    rows.open(first, count, in.rows, tree_start[sequence]);
    bool whole = false;
#pragma unroll
    for (int r = 0; r < Config::kRows; ++r) {
      whole = whole || selected[static_cast<int64_t>(first + min(r, count - 1)) * held] == -2;
    }
    return whole;
  });
}
