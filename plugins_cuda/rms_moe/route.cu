// RmsMoe, first launch: norm and router logits.
//
//   x               [ROWS, HIDDEN] bf16, in; rows from row_start[SEQUENCES] on are padding
//   norm            [HIDDEN] bf16, in, constant
//   router_weight   [EXPERTS + SHARED_GATES, HIDDEN] bf16, in, constant
//   router_bias     [EXPERTS + SHARED_GATES] bf16, in, constant
//   row_start       [SEQUENCES + 1] i32, in
//   workspace_normed    [ROWS, HIDDEN] bf16, out: the live rows, normalized
//   workspace_logits    f32, out, of the live rows: logits [ROWS, EXPERTS]; with SHARED_GATES, from
//                       GATES on, those of the gates, in the first columns of [ROWS, EXPERTS]
//
// route_with_parts.cu has routers with a selection bias, another norm, or factors of experts.
//
// Grid ((EXPERTS + SHARED_GATES) / ROUTER_EXPERTS, ROWS / 8), rounded up. A CTA computes the logits
// of 8 rows for 8 or 16 experts. Each warp has a fixed slice of HIDDEN, whose router weights it
// loads before it waits for x; slices are summed in a fixed order. One row of GPT-OSS reads 184 kB
// (20B) or 737 kB (120B) of weights, during the preceding launch if that leaves a multiprocessor
// per CTA (lowering.py: ROUTER_CTAS). The rest is latency: x from L2, two sums over the warps, 12
// mma in two chains, about 1.5 µs. Kernels that read the logits select experts: RoutedRows in
// expert_routing.cuh.
#include "../_device/ptx.cuh"
#include "device/config.cuh"
#include "device/router.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    route_rows(const uint16_t* x, const uint16_t* __restrict__ norm,
               const uint16_t* __restrict__ router_weight, const uint16_t* __restrict__ router_bias,
               const int* row_start, uint16_t* workspace_normed, float* workspace_logits) {
  DYNAMIC_SHARED(uint4, staged);
  __shared__ SharedRouter shared;
  route(shared, nullptr, staged, x, norm, router_weight, router_bias, row_start, {},
        workspace_normed, workspace_logits);
}
