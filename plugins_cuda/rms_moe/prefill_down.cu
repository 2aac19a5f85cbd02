// RmsMoe over a prompt chunk, down: sorted rows of h · down of their experts.
//
// Tensors and numbers are those of prefill.cu.
#include "device/prefill_down.cuh"

extern "C" __global__ void __launch_bounds__(kGemmThreads, 1)
    moe_down(const unsigned char* down, const uint16_t* down_bias, int* workspace_tiles,
             uint16_t* workspace_rows, const unsigned char* workspace_h, int panel_rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ TileRing<Config> ring;
  DownGemm<kConsumerWarps> gemm;
  gemm.packed = down;
  gemm.panel_start = workspace_h;
  gemm.rows_of_panels = panel_rows;
  gemm.tiles = workspace_tiles;
  gemm.taken = kTakenDown;
  gemm.bias = down_bias;
  gemm.out = workspace_rows;
  prefill_gemm(gemm, ring, shared);
}
