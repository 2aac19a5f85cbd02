// RmsMoe over a prompt chunk, first launch of routers with additional inputs: see prefill.cu.
//
//   x              bf16 [rows, H]       in    from row_start[SEQUENCES] on padding
//   norm           bf16 [H]             in
//   router_weight  bf16 [EXPERTS + SHARED_GATES, H]  in
//   router_bias    bf16 [EXPERTS + SHARED_GATES]  in
//   row_start      int32 [SEQUENCES+1]  in
//   choice_bias    fp32 [EXPERTS]       in    null without SCORES
//   router_norm    fp32 [H]             in    null without ROUTER_NORM
//   expert_scale   fp32 [EXPERTS]       in    null without FACTORS
//   workspace_logits  fp32              as in route_with_parts.cu
//   workspace_chosen  int32 [rows, TOP_K]      out   a row's experts, ascending
//   workspace_shares  fp32 [rows, TOP_K]       out   and their weights
#include "device/config.cuh"
#include "device/prefill_router.cuh"

extern "C" __global__ void __launch_bounds__(kRowsThreads, 1)
    moe_route_with_parts(const uint16_t* x, const uint16_t* norm, const uint16_t* router_weight,
                         const uint16_t* router_bias, const int* row_start,
                         const float* choice_bias, const float* router_norm,
                         const float* expert_scale, float* workspace_logits, int* workspace_chosen,
                         float* workspace_shares) {
  DYNAMIC_SHARED(unsigned char, shared);
  route(shared, x, norm, router_weight, router_bias, row_start,
        {choice_bias, router_norm, expert_scale}, workspace_logits, workspace_chosen,
        workspace_shares);
}
