// RmsMoe, first launch of routers with additional inputs: see route.cu.
//
//   x               [ROWS, HIDDEN] bf16, in; rows from row_start[SEQUENCES] on are padding
//   norm            [HIDDEN] bf16, in, constant
//   router_weight   [EXPERTS + SHARED_GATES, HIDDEN] bf16, in, constant
//   router_bias     [EXPERTS + SHARED_GATES] bf16, in, constant
//   row_start       [SEQUENCES + 1] i32, in
//   choice_bias     [EXPERTS] f32, in, constant; null without SCORES
//   router_norm     [HIDDEN] f32, in, constant: the norm of the router's input; null without
//                   ROUTER_NORM
//   expert_scale    [EXPERTS] f32, in, constant; null without FACTORS
//   workspace_normed    [ROWS, HIDDEN] bf16, out: the live rows, normed
//   workspace_logits    f32, out, live rows of up to four arrays [ROWS, EXPERTS]: with SCORES,
//                       sigmoids plus biases, which select experts (DeepSeek-V3); logits; with
//                       FACTORS, the factors of the experts, repeated for each row; with
//                       SHARED_GATES, the logits of the gates in the first columns
#include "../_device/ptx.cuh"
#include "device/config.cuh"
#include "device/router.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    route_with_parts(const uint16_t* x, const uint16_t* __restrict__ norm,
                     const uint16_t* __restrict__ router_weight,
                     const uint16_t* __restrict__ router_bias, const int* row_start,
                     const float* __restrict__ choice_bias, const float* __restrict__ router_norm,
                     const float* __restrict__ expert_scale, uint16_t* workspace_normed,
                     float* workspace_logits) {
  DYNAMIC_SHARED(uint4, staged);
  __shared__ SharedRouter shared;
  OwnNorm* own = nullptr;
  if constexpr (Config::kRouterNorm != 0) {
    __shared__ OwnNorm of_router;
    own = &of_router;
  }
  route(shared, own, staged, x, norm, router_weight, router_bias, row_start,
        {choice_bias, router_norm, expert_scale}, workspace_normed, workspace_logits);
}
