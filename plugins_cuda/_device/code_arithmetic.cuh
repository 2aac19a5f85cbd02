// Arithmetic of the decoders of quantized checkpoints: row scales and bf16 pairs.
#pragma once

#include "bf16.cuh"
#include "f16.cuh"
#include "ptx_bf16.cuh"
#include "weight_units.cuh"

// A compile-time index: of the rows g and g + 8, or of a pair.
template <int value_>
struct Row {
  static constexpr int value = value_;
};

template <class Visit>
__device__ __forceinline__ void each_pair(const Visit& visit) {
  visit(Row<0>());
  visit(Row<1>());
  visit(Row<2>());
  visit(Row<3>());
}

// Broadcast a value of lane 4g + ``from`` to the four lanes of a row.
__device__ __forceinline__ float float_of_lane(float value, int from) {
  return __shfl_sync(0xFFFFFFFFu, value, (threadIdx.x & 28u) + from);
}

// Shift to the left by ``by`` bits, or to the right if it is negative.
template <int by>
__device__ __forceinline__ uint32_t shifted(uint32_t word) {
  return by < 0 ? word >> (by < 0 ? -by : 0) : word << (by < 0 ? 0 : by);
}

// Convert a byte to a float: it becomes the lowest mantissa bits of 2^23.
__device__ __forceinline__ float byte_to_float(uint32_t word, int place) {
  return __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7540u + place)) - 8388608.0f;
}
// Convert a byte 128 + n to n.
__device__ __forceinline__ float signed_byte_to_float(uint32_t word, int place) {
  return __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7540u + place)) - 8388736.0f;
}

// Multiply a bf16 pair by a float in fp32, then round to bf16.
__device__ __forceinline__ uint32_t scaled_pair(uint32_t pair, float scale) {
  return pack_bf16x2(bf16_low_to_float(pair) * scale, bf16_high_to_float(pair) * scale);
}

// An integer in the lowest ten bits of an fp16 number is this number of subnormal units. Their
// conversion to fp32 is exact and takes one instruction, without masks and without an offset.
constexpr float kUnitsOfF16 = 16777216.0f;  // 2^24

// Multiply an fp16 pair by a float and add another, with one rounding (fma) in fp32; then round to
// bf16.
__device__ __forceinline__ uint32_t fused_pair(uint32_t pair, float scale, float addend) {
  const float2 values = unpack_f16x2(pair);
  return pack_bf16x2(fmaf(values.x, scale, addend), fmaf(values.y, scale, addend));
}

// fp16 scales of rows g and g + 8 as sums of two bf16. This is exact, because fp16 has eleven bits
// of mantissa.
struct SplitScales {
  static constexpr int kFreeBytes = 0;  // at the end of a unit
  uint32_t high, low;

  __device__ __forceinline__ explicit SplitScales(uint32_t scales) {
    const float2 exact = unpack_f16x2(scales);
    high = pack_bf16x2(exact.x, exact.y);
    low = pack_bf16x2(exact.x - bf16_low_to_float(high), exact.y - bf16_high_to_float(high));
  }

  // Multiply integers of at most five bits by the scale of one row. The product with the low part
  // is exact; the fma with the high part rounds once.
  template <int row>
  __device__ __forceinline__ uint32_t multiply(uint32_t codes) const {
    return fma_bf16x2_by_half<row>(codes, high, mul_bf16x2_by_half<row>(codes, low));
  }
};

// bf16 scales of rows g and g + 8.
struct WholeScales {
  static constexpr int kFreeBytes = 16;
  uint32_t scales;

  __device__ __forceinline__ explicit WholeScales(uint32_t scales_) : scales(scales_) {}

  template <int row>
  __device__ __forceinline__ uint32_t multiply(uint32_t codes) const {
    return mul_bf16x2_by_half<row>(codes, scales);
  }
};
