// RmsQkvRope: q, k, v = rms(x) · Wᵀ (+ bias), q and k with RoPE, k and v to their cache slots. With
// HEAD_NORMS q and k are stored without RoPE, for normed_heads.cu or coded_heads.cu.
//
//   x           [rows, 32·K_BLOCKS] bf16, in
//   norm        [32·K_BLOCKS] bf16, in, constant; null without HAS_NORM
//   weight      [TILE_COUNT, K_BLOCKS, 512] bf16, in, constant (rms_qkv_rope/packing.py); or the
//               format WEIGHTS (linear/block_scaled.py)
//   bias        [16·TILE_COUNT] bf16, in, constant, in packed order; null without HAS_BIAS
//   cos, sin    [positions, HEAD_DIM/2] fp32, in, constant; with GROWTH that many positions, after
//               which cos has a factor of queries for each
//   positions   [rows] int32, in
//   write_slot  [rows] int32, in: page · PAGE_SIZE + offset
//   k_pool      [pages, KV_HEADS, PAGE_SIZE, HEAD_DIM] bf16, with CODES e4m3, out at the slots;
//               with CODES and HEAD_NORMS instead [rows, KV_HEADS, HEAD_DIM] bf16
//   v_pool      as k_pool
//   q           [rows, Q_HEADS, HEAD_DIM] bf16, out
//
// Grid (CTAs over pairs of weight rows, groups of 8·TOKEN_TILES tokens). Rows g and g + 8 of a tile
// are elements i and i + HEAD_DIM/2 of a head, so a thread rotates its sums. GPT-OSS reads 29.5 MB,
// 6.5 µs at 4.53 TB/s. Every CTA normalizes the tokens itself; with more tokens, another launch
// does (many_tokens.cu).
#include "../_device/dense_few_pairs.cuh"
#include "device/config.cuh"
#include "device/pair.cuh"

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32, 1)
    rms_qkv_rope(const uint16_t* x, const uint16_t* norm,
                 const PairsOfFew<Config>::Units::Stored* weight, const uint16_t* bias,
                 const float* cos, const float* sin, const int* positions, const int* write_slot,
                 uint16_t* k_pool, uint16_t* v_pool, uint16_t* q, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  const Tensors tensors{cos, sin, positions, write_slot, k_pool, v_pool, q};
  project_pairs<Config, Pair>(tensors, x, norm, weight, bias, rows, shared);
}
