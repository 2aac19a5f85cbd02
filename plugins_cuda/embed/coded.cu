// Embed with a quantized table: x = table[token_ids] · SCALE, each product rounded.
//
//   token_ids  [rows] int32, in
//   table      [V/16, UNITS, …] u8, in the format WEIGHTS (linear/group_codes.py), in, constant
//   x          [rows, 64·UNITS] bf16, out
//
// Grid (rows, groups of WARPS · UNITS_OF_WARP units). A warp decodes a unit as the dense kernels
// do; only the four lanes with the token's row load and store.
#include "../_device/bf16.cuh"
#include "../_device/ptx_load.cuh"
#include "../_device/stored_weights.cuh"

CONFIG

using Units = WeightUnits<Config::kWeights>::Units;
constexpr int kColumns = 64;

__device__ __forceinline__ uint32_t scaled(uint32_t pair) {
  const float2 value = unpack_bf16x2(pair);
  return Config::kScale == 1 ? pair
                             : pack_bf16x2(value.x * Config::kScale, value.y * Config::kScale);
}

// Return the eight values of a row of the tile: of the upper or of the lower half.
__device__ __forceinline__ uint4 values_of(const uint32_t (&first)[4], const uint32_t (&second)[4],
                                           bool lower) {
  return make_uint4(scaled(first[lower]), scaled(first[2 + lower]), scaled(second[lower]),
                    scaled(second[2 + lower]));
}

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32)
    embed_coded(const int* token_ids, const unsigned char* table, uint16_t* x) {
  pdl_launch_dependents();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int begin = (blockIdx.y * Config::kWarps + warp) * Config::kUnitsOfWarp;
  pdl_wait();
  const int token = load_l2_int(token_ids + blockIdx.x);
  const bool own = lane / 4 == token % 8;
  const unsigned char* const row =
      table + static_cast<int64_t>(token / 16) * Config::kUnits * Units::kBytes + lane * 16;
  uint16_t* const to =
      x + static_cast<int64_t>(blockIdx.x) * Config::kUnits * kColumns + lane % 4 * 8;
#pragma unroll
  for (int i = 0; i < Config::kUnitsOfWarp; ++i) {
    const int number = begin + i;
    if (number >= Config::kUnits) break;
    const unsigned char* const unit = row + number * Units::kBytes;
    Units::Held held;
#pragma unroll
    for (int piece = 0; piece < Units::kLoads; ++piece) {
      held.pieces[piece] =
          own ? load_constant16(unit + piece * kLoadBytes) : make_uint4(0, 0, 0, 0);
    }
    load_scales<Units>(held, unit, [&](const void* at) { return own ? load_constant4(at) : 0u; });
    uint32_t first[4], second[4], third[4], fourth[4];
    Units::template decode<0>(held, first, second);
    Units::template decode<1>(held, third, fourth);
    if (!own) continue;
    uint16_t* const at = to + number * kColumns;
    *reinterpret_cast<uint4*>(at) = values_of(first, second, token % 16 >= 8);
    *reinterpret_cast<uint4*>(at + kColumns / 2) = values_of(third, fourth, token % 16 >= 8);
  }
}
