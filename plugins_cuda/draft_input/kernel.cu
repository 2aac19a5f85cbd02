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
#include "../_device/normed_rows.cuh"
#include "../_device/ptx_load.cuh"
#include "../_device/table_row.cuh"

CONFIG

using Rows =
    NormedRows<Config::kWidth, Config::kWarps, static_cast<NormRounding>(Config::kNormRounding)>;
static_assert(Rows::bytes(1) == Config::kSharedBytes, "as the launch says");

namespace {

__device__ __forceinline__ uint32_t added(uint32_t a, uint32_t b) {
  const float2 x = unpack_bf16x2(a), y = unpack_bf16x2(b);
  return pack_bf16x2(x.x + y.x, x.y + y.y);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32)
    draft_input(const int* token_ids, const uint16_t* table, const uint16_t* embed_norm,
                const uint16_t* hidden, const uint16_t* hidden_norm, const uint16_t* residual,
                const uint16_t* factor, uint16_t* u) {
  DYNAMIC_SHARED(unsigned char, shared);
  pdl_launch_dependents();
  const int64_t row = blockIdx.x;
  const bool embeds = Config::kHasTable && blockIdx.y == 0;
  const int segment = Config::kHasTable ? 0 : blockIdx.y;
  const Rows normed(shared, 1);
  normed.fetch_weight(embeds ? embed_norm : hidden_norm + segment * Config::kWidth);
  cp_async_commit();
  pdl_wait();
  normed.read(1, [&](int) {
    if (!embeds)
      return TableRow::in_order(hidden + (row * Config::kSegments + segment) * Config::kWidth);
    return TableRow::of(table, load_l2_int(token_ids + row), Config::kWidth, Config::kPacked != 0);
  });
  cp_async_wait<0>();
  __syncthreads();
  normed.norm(1, static_cast<float>(Config::kEps));
  __syncthreads();
  uint4* out = reinterpret_cast<uint4*>(u + (row * gridDim.y + blockIdx.y) * Config::kWidth);
  for (int i = threadIdx.x; i < Config::kWidth / 8; i += Config::kWarps * 32) {
    uint4 value = reinterpret_cast<const uint4*>(normed.rows)[i];
    if (Config::kHasResidual != 0) {
      const int64_t part = (row * Config::kSegments + segment) * Config::kWidth;
      const uint4 other = load_l2_16(residual + part + i * 8);
      value = make_uint4(added(other.x, value.x), added(other.y, value.y), added(other.z, value.z),
                         added(other.w, value.w));
    }
    if (Config::kHasFactor != 0) {
      const uint32_t one = load_early_bf16(factor), pair = one | one << 16;
      value = make_uint4(mul_bf16x2(value.x, pair), mul_bf16x2(value.y, pair),
                         mul_bf16x2(value.z, pair), mul_bf16x2(value.w, pair));
    }
    out[i] = value;
  }
}
