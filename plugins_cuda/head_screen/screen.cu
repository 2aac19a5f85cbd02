// HeadScreen, first launch: bounds of each tile's scores from int8 weights.
//
//   x                 [T, 32·K_BLOCKS] bf16, in
//   logit_rows        [rows] int32, in
//   norm              [32·K_BLOCKS] bf16, in, constant
//   codes             [TILE_COUNT, ⌈K_BLOCKS/2⌉, 1056] u8, in, constant (linear/block_scaled.py)
//   errors            [16·TILE_COUNT] fp32, in, constant: error bound of a logit for a row of
//                     length 1 (screen.py)
//   temperature       [rows] fp32, in; 0 = argmax
//   seed, position    [rows] int32, in
//   workspace_uppers  [rows, TILE_COUNT] fp32: upper bound of the scores of the tile
//   workspace_best    [rows] u32, zero before: ordered key of the best lower bound
//
// A score increases with its logit, also in fp32, except for the rounding of a cap. Bounds of the
// logit therefore give bounds of the score. The grid is that of head_choose/kernel.cu. For GPT-OSS
// it reads 0.6 GB, 132 µs at 4.53 TB/s.
#include "device/screening.cuh"

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32, 1)
    screen_tiles(const uint16_t* x, const int* logit_rows, const uint16_t* norm,
                 const Units::Stored* codes, const float* errors, const float* temperature,
                 const int* seed, const int* position, float* workspace_uppers,
                 uint32_t* workspace_best, int rows) {
  screen_segments<false>(x, logit_rows, norm, codes, errors, temperature, seed, position,
                         workspace_uppers, workspace_best, rows, 0);
}
