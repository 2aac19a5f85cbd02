// RankSum: the ranks' partial sums become y, with a bias and a residual where there are some.
//
//   partial    [rows, WIDTH] fp32, in
//   bias       [WIDTH] bf16, in, constant; or null
//   residual   [rows, WIDTH] bf16, in; or null
//   inbox      [2, RANKS − 1, WORDS] words of 8 bytes, in and out: see _device/rank_exchange.cuh
//   inbox_on_k the same of the rank that is k further, out; null where there is none
//   state      [2] int32, in: rounds before this program, limit of a wait in ms
//   fault      [8] int32, out, of the host: who waited in vain for whom
//   y          [rows, WIDTH] bf16, out
//
// A thread owns pairs of neighbouring columns, the same on every rank, and PAIRS of them at a time,
// so that their words travel together. A grid is at most 120 CTAs, all of them resident: a CTA of
// one rank that waited for one of another that cannot start would wait for ever. Many rows are
// rounds of ROWS rows.
//
// A round moves 8·WIDTH bytes a row to each peer; one of a single row takes as long as a store takes
// to be seen on the other GPU.
#include "../_device/bf16.cuh"
#include "../_device/l2_word.cuh"
#include "../_device/ptx_load.cuh"
#include "../_device/rank_exchange.cuh"

CONFIG

using Exchange = RankExchange<Config::kRanks, Config::kWords>;

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    rank_sum(const float2* partial, const uint32_t* bias, const int* residual, uint64_t* inbox,
             uint64_t* inbox_on_1, uint64_t* inbox_on_2, uint64_t* inbox_on_3, uint64_t* inbox_on_4,
             uint64_t* inbox_on_5, uint64_t* inbox_on_6, uint64_t* inbox_on_7, const int* state,
             int* fault, uint32_t* y, int rows, int rank, int exchange) {
  constexpr int kRowPairs = Config::kWidth / 2, kPairs = Config::kPairs;
  constexpr int kPeers = Config::kRanks - 1;
  pdl_launch_dependents();
  const int stride = gridDim.x * Config::kThreads;
  const int own_first = blockIdx.x * Config::kThreads + threadIdx.x;
  pdl_wait();
  const Exchange peers(inbox, inbox_on_1, inbox_on_2, inbox_on_3, inbox_on_4, inbox_on_5,
                       inbox_on_6, inbox_on_7, state, fault, rank, exchange);
  for (int round = 0, row = 0; row < rows; ++round, row += Config::kRows) {
    const int pairs = min(rows - row, Config::kRows) * kRowPairs;
    const int64_t base = static_cast<int64_t>(row) * kRowPairs;
    const uint32_t number = peers.number(round);
    for (int first = own_first; first < pairs; first += kPairs * stride) {
      float2 own[kPairs];
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        const int pair = first + p * stride;
        if (pair < pairs) own[p] = load_l2_float2(partial + base + pair);
      }
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        const int pair = first + p * stride;
        if (pair < pairs) peers.push(number, 2 * pair, own[p]);
      }
      // What is added lies on this GPU: it is here before the peers' words are.
      uint32_t added[kPairs] = {}, biases[kPairs] = {};
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        const int pair = first + p * stride;
        if (pair >= pairs) continue;
        if (residual != nullptr) added[p] = load_l2_int(residual + base + pair);
        if (bias != nullptr) biases[p] = load_constant4(bias + pair % kRowPairs);
      }
      WordPair words[kPairs][kPeers];
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        const int pair = first + p * stride;
#pragma unroll
        for (int i = 0; i < kPeers; ++i) {
          if (pair < pairs) words[p][i] = peers.look(number, i, 2 * pair);
        }
      }
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        const int pair = first + p * stride;
        if (pair >= pairs) continue;
        float2 theirs[kPeers];
#pragma unroll
        for (int i = 0; i < kPeers; ++i) {
          theirs[i] = peers.wait(words[p][i], number, i, 2 * pair);
        }
        float2 sum = peers.in_order(own[p], theirs);
        if (bias != nullptr) {
          const float2 b = unpack_bf16x2(biases[p]);
          sum = make_float2(sum.x + b.x, sum.y + b.y);
        }
        uint32_t packed = pack_bf16x2(sum.x, sum.y);
        if (residual != nullptr) {
          const float2 r = unpack_bf16x2(added[p]), s = unpack_bf16x2(packed);
          packed = pack_bf16x2(r.x + s.x, r.y + s.y);
        }
        y[base + pair] = packed;
      }
    }
  }
}
