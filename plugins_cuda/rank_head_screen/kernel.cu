// RankHeadScreen, second launch: exact logits of the candidate tiles and the rank's token; then the
// best token of all ranks.
//
//   x … workspace_arrived  see head_screen/kernel.cu; the weight has the rank's tokens
//   inbox … fault          see rank_sum/kernel.cu
//   choice, logprob        see head_screen/kernel.cu; of the complete vocabulary, on every rank
//
// The last CTA of a group of rows sends 16 bytes per row to each other rank, and selects the
// largest key; equal scores go to the lower token. All other CTAs have finished when it waits.
#include "../_device/rank_exchange.cuh"
#include "../head_screen/device/exact_tiles.cuh"

using Exchange = RankExchange<Config::kRanks, Config::kWords>;

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32, 1) choose_of_screened_ranks(
    const uint16_t* x, const int* logit_rows, const uint16_t* norm, const Units::Stored* weight,
    const float* temperature, const int* seed, const int* position, const float* workspace_uppers,
    uint32_t* workspace_best, unsigned long long* workspace_keys, int* workspace_arrived,
    uint64_t* inbox, uint64_t* inbox_on_1, uint64_t* inbox_on_2, uint64_t* inbox_on_3,
    uint64_t* inbox_on_4, uint64_t* inbox_on_5, uint64_t* inbox_on_6, uint64_t* inbox_on_7,
    const int* state, int* fault, int* choice, float* logprob, int rows, int rank, int exchange) {
  choose_candidate(
      x, logit_rows, norm, weight, temperature, seed, position, workspace_uppers, workspace_best,
      workspace_keys, workspace_arrived, rows, rank * Config::kTileCount * 16,
      [&](int row, uint64_t key) {
        const Exchange peers(inbox, inbox_on_1, inbox_on_2, inbox_on_3, inbox_on_4, inbox_on_5,
                             inbox_on_6, inbox_on_7, state, fault, rank, exchange);
        const uint32_t number = peers.number(0);
        peers.push(number, 2 * row,
                   make_float2(__uint_as_float(static_cast<uint32_t>(key)),
                               __uint_as_float(static_cast<uint32_t>(key >> 32))));
#pragma unroll
        for (int i = 0; i < Exchange::kPeers; ++i) {
          const float2 other = peers.wait(peers.load(number, i, 2 * row), number, i, 2 * row);
          const uint64_t theirs =
              static_cast<uint64_t>(__float_as_uint(other.y)) << 32 | __float_as_uint(other.x);
          key = key < theirs ? theirs : key;
        }
        write_choice(key, choice + row, logprob + row);
      });
}
