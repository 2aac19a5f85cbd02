// RmsQueryLatent: q = rms(x) · W_qᵀ (+ bias), with RoPE; c = rms(x) · W_c, to its cache slot.
//
//   x           [rows, 32·K_BLOCKS] bf16, in
//   norm        [32·K_BLOCKS] bf16, in, constant; null without HAS_NORM
//   weight      [TILE_COUNT, K_BLOCKS, 512] bf16, in, constant (rms_query_latent/packing.py)
//   bias        [16·TILE_COUNT] bf16, in, constant, in packed order; null without HAS_BIAS
//   cos, sin    [positions, HEAD_DIM/2] fp32, in, constant
//   positions   [rows] int32, in
//   write_slot  [rows] int32, in: page · page size + offset
//   c_pool      [pages, 1, page size, LATENT] bf16, out at the slots
//   q           [rows, Q_HEADS, HEAD_DIM] bf16, out
//
// The grid and the order of sums are those of RmsQkvRope. Rows g and g + 8 of a tile are elements i
// and i + HEAD_DIM/2 of a head, or columns of a latent at a distance of 8. With a latent of 512,
// GPT-OSS reads 26.5 MB, 5.9 µs at 4.53 TB/s.
#include "../_device/dense_few_pairs.cuh"
#include "device/config.cuh"
#include "device/pair.cuh"

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32, 1)
    rms_query_latent(const uint16_t* x, const uint16_t* norm,
                     const PairsOfFew<Config>::Units::Stored* weight, const uint16_t* bias,
                     const float* cos, const float* sin, const int* positions,
                     const int* write_slot, uint16_t* c_pool, uint16_t* q, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  const Tensors tensors{cos, sin, positions, write_slot, c_pool, q};
  project_pairs<Config, Pair>(tensors, x, norm, weight, bias, rows, shared);
}
