// RankMoe in prefill, after RmsMoe's grouped GEMMs: the sum of a row's experts, over all ranks. A
// rank rounds the result of each expert to bf16, as RmsMoe does.
//
//   x            [rows, WIDTH] bf16, in: the residual
//   row_start    [SEQUENCES + 1] int32, in: rows from the last entry on are padding
//   inbox … fault  see rank_sum/kernel.cu
//   y            [rows, WIDTH] bf16, out: x + the sum, which is rounded first
//   workspace_shares    [rows, TOP_K] fp32, in: the weights of a row's experts
//   workspace_position  [rows, TOP_K] int32, in: the rows of their results
//   workspace_rows      [positions, WIDTH] bf16, in: the results
//
// Grid: _device/rank_rounds.cuh. Experts are added in the order of RmsMoe, then ranks in order.
#include "device/residual.cuh"

namespace {

struct Prompt : Residual {
  const float* shares;
  const int* position;
  const int* expert_rows;

  __device__ Prompt(Residual residual, const float* shares, const int* position,
                    const int* expert_rows)
      : Residual(residual), shares(shares), position(position), expert_rows(expert_rows) {}
  __device__ __forceinline__ float2 own(int64_t pair) const {
    if (!is_live(pair)) return make_float2(0.0f, 0.0f);
    const int64_t row = pair / kRowPairs, column = pair % kRowPairs;
    int place[kTopK];
    float share[kTopK];
    uint32_t experts[kTopK];
#pragma unroll
    for (int k = 0; k < kTopK; ++k) place[k] = load_l2_int(position + row * kTopK + k);
#pragma unroll
    for (int k = 0; k < kTopK; ++k) share[k] = load_l2_float(shares + row * kTopK + k);
#pragma unroll
    for (int k = 0; k < kTopK; ++k) {
      experts[k] = load_l2_int(expert_rows + static_cast<int64_t>(place[k]) * kRowPairs + column);
    }
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int k = 0; k < kTopK; ++k) {
      const float2 values = unpack_bf16x2(experts[k]);
      sum = make_float2(fmaf(share[k], values.x, sum.x), fmaf(share[k], values.y, sum.y));
    }
    return sum;
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1)
    combine_ranks(const int* x, const int* row_start, uint64_t* inbox, uint64_t* inbox_on_1,
                  uint64_t* inbox_on_2, uint64_t* inbox_on_3, uint64_t* inbox_on_4,
                  uint64_t* inbox_on_5, uint64_t* inbox_on_6, uint64_t* inbox_on_7,
                  const int* state, int* fault, uint32_t* y, const float* workspace_shares,
                  const int* workspace_position, const int* workspace_rows, int rows, int rank,
                  int exchange) {
  pdl_launch_dependents();
  pdl_wait();
  const Exchange peers(inbox, inbox_on_1, inbox_on_2, inbox_on_3, inbox_on_4, inbox_on_5,
                       inbox_on_6, inbox_on_7, state, fault, rank, exchange);
  const Residual residual = {x, y, load_l2_int(row_start + Config::kSequences)};
  exchange_rows<Config>(peers, rows,
                        Prompt(residual, workspace_shares, workspace_position, workspace_rows));
}
