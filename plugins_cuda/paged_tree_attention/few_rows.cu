// PagedTreeAttention together with attend_many (many_rows.cu): sequences with few rows.
//
// The arguments are those of kernel.cu. A CTA of a sequence with more rows returns; any other is
// that of the plain kernel.
#include "device/config.cuh"
#include "device/few_rows.cuh"
#include "kernel.cu"

extern "C" __global__ void __launch_bounds__(kThreads, Config::kCtasOfAnSm)
    attend_few(const uint32_t* q, const uint4* k_pool, const uint4* v_pool, const int* page_table,
               const int* row_start, const int* row_slot, const int* tree_start,
               const int* ancestor_bits, const float* sinks, const int* selected, uint2* attended,
               int* workspace_arrivals, float2* workspace_sums, float4* workspace_values) {
  pdl_launch_dependents();
  pdl_wait();
  if (!is_few(row_start, blockIdx.z)) return;
  attend(INPUTS, attended, workspace_arrivals, workspace_sums, workspace_values);
}
