// RmsMoe in prefill with few rows per expert, gate/up: h = activation(sorted rows · gate and up of
// their experts).
//
// The arguments are those of prefill.cu.
#include "device/prefill_few.cuh"
#include "device/prefill_gate_up.cuh"

extern "C" __global__ void __launch_bounds__(kFewThreads, 1)
    moe_few_gate_up(const unsigned char* gate_up, const uint16_t* gate_up_bias,
                    int* workspace_tiles, const unsigned char* workspace_rows,
                    unsigned char* workspace_h, int panel_rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ FewRings rings;
  const auto gemm = gate_up_gemm<kFewWarps>(gate_up, gate_up_bias, workspace_tiles, workspace_rows,
                                            workspace_h, panel_rows);
  few_gemm(gemm, rings, shared);
}
