// RmsQkvRope for many tokens: CTAs split K too.
//
//   x … q              see kernel.cu
//   workspace_tokens   with TOKENS_READY: tokens (linear/normed_tokens.cu or token_panels.cu)
//   workspace_sums     [groups of tokens][SLICES / GROUP_SLICES][TILE_COUNT][TOKEN_TILES][128] fp32
//   workspace_arrived  [groups of tokens, CTAS] uint32, zeros before and after
//
// Grid (CTAs over rows of the weight and groups of K slices, groups of 8·TOKEN_TILES tokens):
// _device/many_tokens.cuh, or with PANELS _device/many_panels.cuh.
#include "../_device/dense_many_pairs.cuh"
#include "device/config.cuh"
#include "device/pair.cuh"

extern "C" __global__ void __launch_bounds__(DenseMany<Config>::Many::kThreads, 1)
    rms_qkv_rope_of_many(const uint16_t* x, const DenseMany<Config>::Units::Stored* weight,
                         const uint16_t* bias, const float* cos, const float* sin,
                         const int* positions, const int* write_slot, uint16_t* k_pool,
                         uint16_t* v_pool, uint16_t* q, const unsigned char* workspace_tokens,
                         float* workspace_sums, unsigned* workspace_arrived, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  const Tensors tensors{cos, sin, positions, write_slot, k_pool, v_pool, q};
  project_many_pairs<Config, Pair>(tensors, x, weight, bias, workspace_tokens, workspace_sums,
                                   workspace_arrived, rows, shared);
}
