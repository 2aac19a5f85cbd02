// Embed: x = table[token_ids].
//
//   token_ids  [rows] int32, in
//   table      [V, 8·VECTORS] bf16, in, constant; or, PACKED, [V/16, VECTORS/4, 512]
//   x          [rows, 8·VECTORS] bf16, out
//
// A thread copies 16 bytes.
#include "../_device/ptx.cuh"
#include "../_device/table_row.cuh"

CONFIG

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    embed(const int* token_ids, const uint16_t* table, uint4* x, int rows) {
  pdl_launch_dependents();
  const int index = blockIdx.x * Config::kThreads + threadIdx.x, row = index / Config::kVectors;
  pdl_wait();
  if (row >= rows) return;
  const int64_t token = load_l2_int(token_ids + row);
  const TableRow found = TableRow::of(table, token, 8 * Config::kVectors, Config::kPacked != 0);
  x[index] = load_constant16(found + index % Config::kVectors * 8);
}
