// RankHeadScreen's first launch: bounds of each tile's scores, of the tokens of a rank.
//
//   x … workspace_best  as head_screen/screen.cu's; codes and errors are of the rank's tokens
//
// These follow the tokens of the ranks before it.
// Noise is that of a token's place in the whole vocabulary. The best lower bound is the rank's own:
// more tiles are read again than of the whole vocabulary, and the choice stays exact.
#include "../head_screen/device/screening.cuh"

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32, 1)
    rank_screen_tiles(const uint16_t* x, const int* logit_rows, const uint16_t* norm,
                      const Units::Stored* codes, const float* errors, const float* temperature,
                      const int* seed, const int* position, float* workspace_uppers,
                      uint32_t* workspace_best, int rows, int rank) {
  screen_segments<true>(x, logit_rows, norm, codes, errors, temperature, seed, position,
                        workspace_uppers, workspace_best, rows, rank * Config::kTileCount * 16);
}
