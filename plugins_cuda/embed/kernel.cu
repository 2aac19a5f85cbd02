// Embed: x = SCALE · table[token_ids].
//
//   token_ids  [rows] int32, in
//   table      [V, 8·VECTORS] bf16, in, constant; or, PACKED, [V/16, VECTORS/4, 512]
//   x          [rows, 8·VECTORS] bf16, out
//
// A thread copies 16 bytes.
#include "../_device/bf16.cuh"
#include "../_device/ptx.cuh"
#include "../_device/table_row.cuh"

CONFIG

namespace {

__device__ __forceinline__ uint32_t scaled(uint32_t pair) {
  const float2 value = unpack_bf16x2(pair);
  return Config::kScale == 1 ? pair
                             : pack_bf16x2(value.x * Config::kScale, value.y * Config::kScale);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    embed(const int* token_ids, const uint16_t* table, uint4* x, int rows) {
  pdl_launch_dependents();
  const int index = blockIdx.x * Config::kThreads + threadIdx.x, row = index / Config::kVectors;
  pdl_wait();
  if (row >= rows) return;
  const int64_t token = load_l2_int(token_ids + row);
  const TableRow entry = TableRow::of(table, token, 8 * Config::kVectors, Config::kPacked != 0);
  const uint4 value = load_constant16(entry + index % Config::kVectors * 8);
  x[index] = make_uint4(scaled(value.x), scaled(value.y), scaled(value.z), scaled(value.w));
}
