// HeadScreen, second launch: exact logits of the candidate tiles, and the token.
//
//   x, logit_rows, norm, temperature, seed, position, workspace_uppers, workspace_best
//                      see screen.cu
//   weight             [TILE_COUNT, K_BLOCKS, 512] bf16, in, constant (linear/packing.py)
//   workspace_keys     [rows] u64, zero before: ranked key of the best score so far
//   workspace_arrived  [groups of rows] int32, zero before
//   choice             [rows] int32, out
//   logprob            [rows] fp32, out: infinity; NaN if all scores are NaN
//
// Grid (CTAs, groups of 8·TOKEN_TILES rows). CTAs take every n-th tile, because likely candidates
// are adjacent. Logits have the bits of head_choose/kernel.cu: a warp multiplies all of a tile, in
// the same order. The last CTA of a group writes the tokens and restores the zeros of the
// workspaces.
#include "device/exact_tiles.cuh"

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32, 1)
    choose_of_screened(const uint16_t* x, const int* logit_rows, const uint16_t* norm,
                       const Units::Stored* weight, const float* temperature, const int* seed,
                       const int* position, const float* workspace_uppers, uint32_t* workspace_best,
                       unsigned long long* workspace_keys, int* workspace_arrived, int* choice,
                       float* logprob, int rows) {
  choose_candidate(x, logit_rows, norm, weight, temperature, seed, position, workspace_uppers,
                   workspace_best, workspace_keys, workspace_arrived, rows, 0,
                   [&](int row, uint64_t key) { write_choice(key, choice + row, logprob + row); });
}
