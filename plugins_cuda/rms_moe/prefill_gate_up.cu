// RmsMoe in prefill, gate/up: h = activation(sorted rows · gate and up of their experts).
//
// The arguments are those of prefill.cu.
#include "device/prefill_gate_up.cuh"

extern "C" __global__ void __launch_bounds__(kGemmThreads, 1)
    moe_gate_up(const unsigned char* gate_up, const uint16_t* gate_up_bias, int* workspace_tiles,
                const unsigned char* workspace_rows, unsigned char* workspace_h, int panel_rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ TileRing<Config> ring;
  const auto gemm = gate_up_gemm<kConsumerWarps>(gate_up, gate_up_bias, workspace_tiles,
                                                 workspace_rows, workspace_h, panel_rows);
  prefill_gemm(gemm, ring, shared);
}
