// RmsQkvRope with norms of its heads and quantized caches: normed_heads.cu with projected keys in a
// workspace, because quantization before the norm would round twice. Prefill uses it too.
//
//   q_norm … write_slot, q  see normed_heads.cu
//   k_pool                  [pages, KV_HEADS, PAGE_SIZE, HEAD_DIM] e4m3, out at the slots
//   workspace_keys          [rows, KV_HEADS, HEAD_DIM] bf16, in
#include "device/config.cuh"
#include "device/normed_heads.cuh"

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    rms_qkv_rope_coded_heads(const uint16_t* q_norm, const uint16_t* k_norm, const float* cos,
                             const float* sin, const int* positions, const int* write_slot,
                             uint16_t* k_pool, uint16_t* v_pool, uint16_t* q,
                             uint16_t* workspace_keys, int rows) {
  const NormedHeads<Config::kQHeads, Config::kKvHeads, Config::kHeadDim, Config::kPageSize,
                    static_cast<NormRounding>(Config::kHeadRounding), true,
                    Config::kWholeNorms != 0>
      heads{cos, sin, positions, write_slot, k_pool, v_pool, q, workspace_keys};
  heads.turn(q_norm, k_norm, static_cast<float>(Config::kEps), rows);
}
