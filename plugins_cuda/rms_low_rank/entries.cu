// RmsLowRank, last launch: norms of a row's parts, RoPE, and the entry in its cache slot.
//
//   q_norm               [QUERY] bf16, in, constant; null without QUERY_NORM
//   latent_norm          [RANK] bf16, in, constant
//   cos, sin             [positions, ROPE/2] fp32, in, constant
//   positions            [rows] int32, in
//   write_slot           [rows] int32, in: page · page size + offset
//   c_pool               [pages, 1, page size, ENTRY] bf16, out at the slots: normalized latent,
//                        rotated key, zeros
//   q                    [rows, QUERY] bf16, out
//   workspace_projected  [rows, QUERY + RANK + ROPE] bf16, in
//
// Grid (rows, 2): device/entries.cuh. A row of DeepSeek-V3 has 4.2 KB in and out, in L2. The cost
// is that of a launch, less than 2 µs.
#include "device/entries.cuh"

extern "C" __global__ void __launch_bounds__(kEntryThreads)
    rms_low_rank_entries(const uint16_t* q_norm, const uint16_t* latent_norm, const float* cos,
                         const float* sin, const int* positions, const int* write_slot,
                         uint16_t* c_pool, uint16_t* q, const uint16_t* workspace_projected) {
  DYNAMIC_SHARED(unsigned char, shared);
  write_entries(
      {q_norm, latent_norm, cos, sin, positions, write_slot, c_pool, q, workspace_projected},
      shared);
}
