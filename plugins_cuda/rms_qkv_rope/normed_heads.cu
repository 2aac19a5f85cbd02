// RmsQkvRope with norms of its heads: queries and keys, which kernel.cu has projected and rounded,
// are normed and rotated where it has put them; with VALUE_NORM values are normed, too.
//
//   q_norm, k_norm  [HEAD_DIM] bf16, in, constant; with WHOLE_NORMS [Q_HEADS·HEAD_DIM],
//                   [KV_HEADS·HEAD_DIM]
//   cos, sin        [positions, HEAD_DIM/2] fp32, in, constant
//   positions       [rows] int32, in
//   write_slot      [rows] int32, in: page · PAGE_SIZE + offset
//   k_pool          [pages, KV_HEADS, PAGE_SIZE, HEAD_DIM] bf16, in and out at the slots
//   v_pool          as k_pool; with VALUE_NORM in and out
//   q               [rows, Q_HEADS, HEAD_DIM] bf16, in and out
//
// Grid: threads over heads of rows, with WHOLE_NORMS CTAs for all heads of a row, its queries and
// its keys (device/normed_heads.cuh). A row of 40 heads of 128 is 10 KB in
// and out, in L2: what it costs is a launch, less than 2 µs.
#include "device/config.cuh"
#include "device/normed_heads.cuh"

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    rms_qkv_rope_heads(const uint16_t* q_norm, const uint16_t* k_norm, const float* cos,
                       const float* sin, const int* positions, const int* write_slot,
                       uint16_t* k_pool, uint16_t* v_pool, uint16_t* q, int rows) {
  const NormedHeads<Config::kQHeads, Config::kKvHeads, Config::kHeadDim, Config::kPageSize,
                    static_cast<NormRounding>(Config::kHeadRounding), false,
                    Config::kWholeNorms != 0, Config::kValueNorm != 0>
      heads{cos, sin, positions, write_slot, k_pool, v_pool, q};
  heads.turn(q_norm, k_norm, static_cast<float>(Config::kEps), rows);
}
