// RankSum: adds the partial sums of all ranks to y, with an optional bias and residual.
//
//   partial    [rows, WIDTH] fp32, in
//   bias       [WIDTH] bf16, in, constant; or null
//   residual   [rows, WIDTH] bf16, in; or null
//   inbox      [2, RANKS − 1, WORDS] words of 8 bytes, in and out: see _device/rank_exchange.cuh
//   inbox_on_k the inbox of the rank at distance k, out; null if there is none
//   state      [2] int32, in: rounds before this program, limit of a wait in ms
//   fault      [8] int32, out, host memory: the ranks of a wait that timed out
//   y          [rows, WIDTH] bf16, out
//
// Grid: _device/rank_rounds.cuh.
#include "../_device/bf16.cuh"
#include "../_device/l2_word.cuh"
#include "../_device/ptx_load.cuh"
#include "../_device/rank_rounds.cuh"

CONFIG

using Exchange = RankExchange<Config::kRanks, Config::kWords>;

namespace {

struct Sum {
  struct Ahead {
    uint32_t residual, bias;
  };
  const float2* partial;
  const uint32_t* bias;
  const int* residual;
  uint32_t* y;

  __device__ __forceinline__ float2 own(int64_t pair) const {
    return load_l2_float2(partial + pair);
  }
  __device__ __forceinline__ Ahead ahead(int64_t pair, int column) const {
    Ahead added = {};
    if (residual != nullptr) added.residual = load_l2_int(residual + pair);
    if (bias != nullptr) added.bias = load_constant4(bias + column);
    return added;
  }
  __device__ __forceinline__ void end(int64_t pair, Ahead added, float2 sum) const {
    if (bias != nullptr) {
      const float2 b = unpack_bf16x2(added.bias);
      sum = make_float2(sum.x + b.x, sum.y + b.y);
    }
    uint32_t packed = pack_bf16x2(sum.x, sum.y);
    if (residual != nullptr) {
      const float2 r = unpack_bf16x2(added.residual), s = unpack_bf16x2(packed);
      packed = pack_bf16x2(r.x + s.x, r.y + s.y);
    }
    y[pair] = packed;
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1)
    rank_sum(const float2* partial, const uint32_t* bias, const int* residual, uint64_t* inbox,
             uint64_t* inbox_on_1, uint64_t* inbox_on_2, uint64_t* inbox_on_3, uint64_t* inbox_on_4,
             uint64_t* inbox_on_5, uint64_t* inbox_on_6, uint64_t* inbox_on_7, const int* state,
             int* fault, uint32_t* y, int rows, int rank, int exchange) {
  pdl_launch_dependents();
  pdl_wait();
  const Exchange peers(inbox, inbox_on_1, inbox_on_2, inbox_on_3, inbox_on_4, inbox_on_5,
                       inbox_on_6, inbox_on_7, state, fault, rank, exchange);
  exchange_rows<Config>(peers, rows, Sum{partial, bias, residual, y});
}
