// RankMoe in decoding, after RmsMoe's launches up to down: the sum of a row's experts, over all
// ranks.
//
//   x            [rows, WIDTH] bf16, in: the residual
//   row_start    [SEQUENCES + 1] int32, in: rows from the last entry on are padding
//   inbox … fault  see rank_sum/kernel.cu
//   y            [rows, WIDTH] bf16, out: x + the sum, which is rounded first
//   workspace_partial   [rows, TOP_K, WIDTH] fp32, in: weighted results of experts
//
// Grid: _device/rank_rounds.cuh. Experts are added in the order of RmsMoe, then ranks in order.
#include "device/residual.cuh"

namespace {

struct Decoded : Residual {
  const float2* partial;

  __device__ Decoded(Residual residual, const float2* partial)
      : Residual(residual), partial(partial) {}
  __device__ __forceinline__ float2 own(int64_t pair) const {
    if (!is_live(pair)) return make_float2(0.0f, 0.0f);
    const int64_t row = pair / kRowPairs, column = pair % kRowPairs;
    float2 experts[kTopK];
#pragma unroll
    for (int k = 0; k < kTopK; ++k) {
      experts[k] = load_l2_float2(partial + (row * kTopK + k) * kRowPairs + column);
    }
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int k = 0; k < kTopK; ++k) sum = make_float2(sum.x + experts[k].x, sum.y + experts[k].y);
    return sum;
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1)
    add_ranks(const int* x, const int* row_start, uint64_t* inbox, uint64_t* inbox_on_1,
              uint64_t* inbox_on_2, uint64_t* inbox_on_3, uint64_t* inbox_on_4,
              uint64_t* inbox_on_5, uint64_t* inbox_on_6, uint64_t* inbox_on_7, const int* state,
              int* fault, uint32_t* y, const float2* workspace_partial, int rows, int rank,
              int exchange) {
  pdl_launch_dependents();
  pdl_wait();
  const Exchange peers(inbox, inbox_on_1, inbox_on_2, inbox_on_3, inbox_on_4, inbox_on_5,
                       inbox_on_6, inbox_on_7, state, fault, rank, exchange);
  const Residual residual = {x, y, load_l2_int(row_start + Config::kSequences)};
  exchange_rows<Config>(peers, rows, Decoded(residual, workspace_partial));
}
