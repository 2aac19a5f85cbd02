// MlaAttention with lists of slots (DSA), for whole rows.
//
//   selected       i32  [T, 1, held]; a list that starts with −2 is that of a whole row
//   the rest       see kernel.cu
//
// A CTA without a whole row returns. Any other is the plain kernel's CTA, so that these rows have
// its bits. attend_listed overwrites the sums of the other rows.
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
  // Most launches have no whole row.
  const auto early = [] { return false; };
  attend_sequence(in, memory, early, [&](LatentRows& rows, int first, int count, int sequence) {
    // All rows are opened, even others: otherwise the registers hold their spans twice.
    rows.open(first, count, in.rows, tree_start[sequence]);
    bool whole = false;
#pragma unroll
    for (int r = 0; r < Config::kRows; ++r) {
      whole = whole || selected[static_cast<int64_t>(first + min(r, count - 1)) * held] == -2;
    }
    return whole;
  });
}
