// HeadScreen's second launch: of the tiles whose bounds reach the best, the logits and the token.
//
//   x, logit_rows, norm, temperature, seed, position, workspace_uppers, workspace_best
//                      as screen.cu's
//   weight             [TILE_COUNT, K_BLOCKS, 512] bf16, in, constant (linear/packing.py)
//   workspace_keys     [rows] u64, zero before: ranked key of the best score so far
//   workspace_arrived  [groups of rows] int32, zero before
//   choice             [rows] int32, out
//   logprob            [rows] fp32, out: infinite; NaN where all scores are
//
// Grid (CTAs, groups of 8·TOKEN_TILES rows): tiles are dealt out, as the likely ones are
// neighbours. Logits have head_choose/kernel.cu's bits: a warp has all of a tile, in the same
// order. The last CTA of a group writes the tokens and leaves the workspaces zero.
#include "device/settling.cuh"

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32, 1)
    choose_of_screened(const uint16_t* x, const int* logit_rows, const uint16_t* norm,
                       const Units::Stored* weight, const float* temperature, const int* seed,
                       const int* position, const float* workspace_uppers, uint32_t* workspace_best,
                       unsigned long long* workspace_keys, int* workspace_arrived, int* choice,
                       float* logprob, int rows) {
  settle_candidates(x, logit_rows, norm, weight, temperature, seed, position, workspace_uppers,
                    workspace_best, workspace_keys, workspace_arrived, rows, 0,
                    [&](int row, uint64_t key) { write_choice(key, choice + row, logprob + row); });
}
