// DraftInput: u = [rms(table[token_ids]); rms(hidden)], or rms(hidden) alone without HAS_TABLE, in
// SEGMENTS of which each is normed for itself.
//
//   token_ids    [rows] int32, in
//   table        [V, WIDTH] bf16, in, constant, or, PACKED, [V/16, WIDTH/32, 512]; null without
//                HAS_TABLE
//   embed_norm   [WIDTH] bf16, in, constant; null without HAS_TABLE
//   hidden       [rows, SEGMENTS·WIDTH] bf16, in
//   hidden_norm  [SEGMENTS·WIDTH] bf16, in, constant
//   u            [rows, SEGMENTS·WIDTH or, with HAS_TABLE, 2·WIDTH] bf16, out
//
// One CTA norms one part of a row: grid (rows, parts), the embedding first. The norms cast before
// their weight.
#include "../_device/normed_rows.cuh"
#include "../_device/table_row.cuh"

using Rows = NormedRows<WIDTH, WARPS, NormRounding::kCastFirst>;

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    draft_input(const int* token_ids, const uint16_t* table, const uint16_t* embed_norm,
                const uint16_t* hidden, const uint16_t* hidden_norm, uint16_t* u) {
  DYNAMIC_SHARED(unsigned char, shared);
  pdl_launch_dependents();
  const int64_t row = blockIdx.x;
  const bool embeds = HAS_TABLE && blockIdx.y == 0;
  const int segment = HAS_TABLE ? 0 : blockIdx.y;
  const Rows normed(shared, 1);
  normed.fetch_weight(embeds ? embed_norm : hidden_norm + segment * WIDTH);
  cp_async_commit();
  pdl_wait();
  normed.read(1, [&](int) {
    if (!embeds) return TableRow::in_order(hidden + (row * SEGMENTS + segment) * WIDTH);
    return TableRow::of(table, load_l2_int(token_ids + row), WIDTH, PACKED != 0);
  });
  cp_async_wait<0>();
  __syncthreads();
  normed.norm(1, static_cast<float>(EPS));
  __syncthreads();
  uint4* out = reinterpret_cast<uint4*>(u + (row * gridDim.y + blockIdx.y) * WIDTH);
  for (int i = threadIdx.x; i < WIDTH / 8; i += WARPS * 32) {
    out[i] = reinterpret_cast<const uint4*>(normed.rows)[i];
  }
}
