// RmsMoe, first launch where experts are chosen by biased scores (DeepSeek-V3): see route.cu.
//
//   x               [ROWS, HIDDEN] bf16, in; rows from row_start[SEQUENCES] on are padding
//   norm            [HIDDEN] bf16, in, constant
//   router_weight   [EXPERTS, HIDDEN] bf16, in, constant
//   router_bias     [EXPERTS] bf16, in, constant
//   row_start       [SEQUENCES + 1] i32, in
//   choice_bias     [EXPERTS] f32, in, constant
//   workspace_normed    [ROWS, HIDDEN] bf16, out: the live rows, normed
//   workspace_logits    [2, ROWS, EXPERTS] f32, out, of the live rows: what experts are chosen
//                       by, sigmoids and biases; then logits
#include "../_device/ptx.cuh"
#include "device/config.cuh"
#include "device/router.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    route_biased_rows(const uint16_t* x, const uint16_t* __restrict__ norm,
                      const uint16_t* __restrict__ router_weight,
                      const uint16_t* __restrict__ router_bias, const int* row_start,
                      const float* __restrict__ choice_bias, uint16_t* workspace_normed,
                      float* workspace_logits) {
  DYNAMIC_SHARED(uint4, staged);
  __shared__ SharedRouter shared;
  route(shared, staged, x, norm, router_weight, router_bias, row_start, choice_bias,
        workspace_normed, workspace_logits);
}
