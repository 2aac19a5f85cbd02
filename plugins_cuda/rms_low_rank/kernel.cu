// RmsLowRank, the projection: y = rms(x) · Wᵀ, where W has the rows of W_q_a (or W_q), then those
// of W_kv_a.
//
//   x                    [rows, 32·K_BLOCKS] bf16, in
//   norm                 [32·K_BLOCKS] bf16, in, constant; null without HAS_NORM
//   weight               [TILE_COUNT, K_BLOCKS, 512] bf16, in, constant (linear/packing.py); or
//                        the format WEIGHTS (linear/block_scaled.py)
//   workspace_projected  [rows, 16·TILE_COUNT] bf16, out
//
// The grid and the order of sums are those of Linear. [1536 + 576, 7168] of DeepSeek-V3 has 30.3
// MB, 6.7 µs at 4.53 TB/s. entries.cu follows.
#include "../_device/dense_few_pairs.cuh"
#include "device/config.cuh"
#include "device/pair.cuh"

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32, 1)
    rms_low_rank(const uint16_t* x, const uint16_t* norm,
                 const PairsOfFew<Config>::Units::Stored* weight, uint16_t* workspace_projected,
                 int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  project_pairs<Config, Pair>(Projected{workspace_projected}, x, norm, weight, nullptr, rows,
                              shared);
}
