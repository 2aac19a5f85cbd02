// RankHeadScreen, first launch: bounds of each tile's scores, for the tokens of a rank.
//
//   x … workspace_best  see head_screen/screen.cu; codes and errors belong to the rank's tokens,
//                       which follow those of lower ranks
//
// The noise of a token depends on its index in the complete vocabulary. The best lower bound is
// that of the rank. More tiles are therefore candidates than with one rank, and the choice remains
// exact.
#include "../head_screen/device/screening.cuh"

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32, 1)
    rank_screen_tiles(const uint16_t* x, const int* logit_rows, const uint16_t* norm,
                      const Units::Stored* codes, const float* errors, const float* temperature,
                      const int* seed, const int* position, float* workspace_uppers,
                      uint32_t* workspace_best, int rows, int rank) {
  screen_segments<true>(x, logit_rows, norm, codes, errors, temperature, seed, position,
                        workspace_uppers, workspace_best, rows, rank * Config::kTileCount * 16);
}
