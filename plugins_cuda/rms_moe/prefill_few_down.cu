// RmsMoe in prefill with few rows per expert, down: sorted rows of h · down of their experts.
//
// The arguments are those of prefill.cu.
#include "device/prefill_few.cuh"
#include "device/prefill_down.cuh"

extern "C" __global__ void __launch_bounds__(kFewThreads, 1)
    moe_few_down(const unsigned char* down, const uint16_t* down_bias, int* workspace_tiles,
                 uint16_t* workspace_rows, const unsigned char* workspace_h, int panel_rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ FewRings rings;
  const auto gemm = down_gemm<kFewWarps>(down, down_bias, workspace_tiles, workspace_rows,
                                         workspace_h, panel_rows);
  few_gemm(gemm, rings, shared);
}
