// HeadScreen's first launch: bounds of each tile's scores, from int8 codes of the weight.
//
//   x                 [T, 32·K_BLOCKS] bf16, in
//   logit_rows        [rows] int32, in
//   norm              [32·K_BLOCKS] bf16, in, constant
//   codes             [TILE_COUNT, ⌈K_BLOCKS/2⌉, 1056] u8, in, constant (linear/block_scaled.py)
//   errors            [16·TILE_COUNT] fp32, in, constant: of a logit for a row of length 1
//                     (screen.py)
//   temperature       [rows] fp32, in; 0 = argmax
//   seed, position    [rows] int32, in
//   workspace_uppers  [rows, TILE_COUNT] fp32: no token of the tile has a larger score
//   workspace_best    [rows] u32, zero before: ordered key of a score that some token reaches
//
// A score is an increasing function of its logit, and stays one when it is computed in fp32, a cap
// aside: bounds of the logit give those of the score. Grid as head_choose/kernel.cu's. 0.6 GB for
// GPT-OSS, 132 µs at 4.53 TB/s.
#include "device/screening.cuh"

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32, 1)
    screen_tiles(const uint16_t* x, const int* logit_rows, const uint16_t* norm,
                 const Units::Stored* codes, const float* errors, const float* temperature,
                 const int* seed, const int* position, float* workspace_uppers,
                 uint32_t* workspace_best, int rows) {
  screen_segments<false>(x, logit_rows, norm, codes, errors, temperature, seed, position,
                         workspace_uppers, workspace_best, rows, 0);
}
