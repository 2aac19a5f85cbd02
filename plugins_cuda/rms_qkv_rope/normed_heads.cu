// RmsQkvRope with norms of its heads: norms and RoPE, in place, of the queries and keys that
// kernel.cu has projected and rounded; with VALUE_NORM also a norm of values.
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
// Grid: threads over heads of rows, or with WHOLE_NORMS a CTA per row for its queries and one for
// its keys (device/normed_heads.cuh). A row of 40 heads of 128 has 10 KB in and out, in L2. The
// cost is that of a launch, less than 2 µs.
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
