// DraftInput: u = [rms(table[token_ids]); rms(hidden)]. Without HAS_TABLE it is rms(hidden) alone,
// in SEGMENTS with a separate norm each, or factor · (residual + rms(hidden)).
//
//   token_ids    [rows] int32, in
//   table        [V, WIDTH] bf16, in, constant, or, PACKED, [V/16, WIDTH/32, 512]; null without
//                HAS_TABLE
//   embed_norm   [WIDTH] bf16, in, constant; null without HAS_TABLE
//   hidden       [rows, SEGMENTS·WIDTH] bf16, in
//   hidden_norm  [SEGMENTS·WIDTH] bf16, in, constant
//   residual     as hidden, in; null without HAS_RESIDUAL
//   factor       [1] bf16, in, constant; null without HAS_FACTOR
//   u            [rows, SEGMENTS·WIDTH or, with HAS_TABLE, 2·WIDTH] bf16, out
//
// One CTA normalizes one part of a row. Grid (rows, parts), the embedding first.
#include "device/part.cuh"

static_assert(Rows::bytes(1) == Config::kSharedBytes, "as the launch says");

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32)
    draft_input(const int* token_ids, const uint16_t* table, const uint16_t* embed_norm,
                const uint16_t* hidden, const uint16_t* hidden_norm, const uint16_t* residual,
                const uint16_t* factor, uint16_t* u) {
  DYNAMIC_SHARED(unsigned char, shared);
  pdl_launch_dependents();
  const int64_t row = blockIdx.x;
  const Part part(row, blockIdx.y, gridDim.y);
  const Rows normed(shared, 1);
  normed.fetch_weight(part.weight(embed_norm, hidden_norm));
  cp_async_commit();
  pdl_wait();
  normed.read(1, [&](int) { return part.source(token_ids, table, hidden); });
  cp_async_wait<0>();
  __syncthreads();
  normed.norm(1, static_cast<float>(Config::kEps));
  __syncthreads();
  for (int i = threadIdx.x; i < Config::kWidth / 8; i += Config::kWarps * 32)
    part.store(u, i, reinterpret_cast<const uint4*>(normed.rows)[i], residual, factor);
}
