// Weights with a byte per quantized value of a checkpoint (linear/byte_codes.py).
//
// As in nibble_units.cuh, a value is dequantized as by the checkpoint, and rounded once to bf16.
#pragma once

#include "code_arithmetic.cuh"

template <int scale_bytes, int scale_words = 1>
struct ByteCodeUnits : QuantizedUnits<2, scale_bytes, scale_words> {
  static constexpr SeparateSteps kSeparateSteps = SeparateSteps::kAlways;

  // Call of_word(row, four bytes, low pair, high pair) for each word of a block.
  template <int block, class Held, class OfWord>
  static __device__ __forceinline__ void decode_words(const Held& held, uint32_t (&first)[4],
                                                      uint32_t (&second)[4],
                                                      const OfWord& of_word) {
    const uint4 codes = held.pieces[block];
    uint32_t a[4], b[4];
    of_word(Row<0>(), codes.x, a[0], a[1]);
    of_word(Row<0>(), codes.y, a[2], a[3]);
    of_word(Row<1>(), codes.z, b[0], b[1]);
    of_word(Row<1>(), codes.w, b[2], b[3]);
    Bf16Units::set_operand(first, a[0], b[0], a[1], b[1]);
    Bf16Units::set_operand(second, a[2], b[2], a[3], b[3]);
  }
};

// Bytes 128 + value, with an fp16 or bf16 scale per 32 columns.
template <bool bf16>
struct Q8Units : ByteCodeUnits<bf16 ? 96 : 64> {
  using Base = ByteCodeUnits<bf16 ? 96 : 64>;

  static __device__ __forceinline__ int scale_place(int, int g, int t) {
    return (g * 2 + t % 2) * 4;
  }

  template <int block, class Held>
  static __device__ __forceinline__ void decode(const Held& held, uint32_t (&first)[4],
                                                uint32_t (&second)[4]) {
    const uint32_t stored = held.template word<0>(block);
    const float2 scales = bf16 ? unpack_bf16x2(stored) : unpack_f16x2(stored);
    Base::template decode_words<block>(
        held, first, second, [&](auto row, uint32_t word, uint32_t& low, uint32_t& high) {
          const float scale = row.value ? scales.y : scales.x;
          const auto value = [&](auto i) { return signed_byte_to_float(word, i.value) * scale; };
          low = pack_bf16x2(value(Row<0>()), value(Row<1>()));
          high = pack_bf16x2(value(Row<2>()), value(Row<3>()));
        });
  }
};

// Bytes 128 + value, with an fp32 scale per 16 columns and an fp32 minimum per 32 columns.
struct MixedUnits : ByteCodeUnits<384, 3> {
  // A word of the scales of each row: lane t has those of columns 16t … 16t+15. Then the minima of
  // both rows in both blocks.
  static __device__ __forceinline__ int scale_place(int number, int g, int t) {
    return number == 2 ? 256 + (g * 4 + t) * 4 : (g * 8 + number * 4 + t) * 4;
  }

  template <int block, class Held>
  static __device__ __forceinline__ void decode(const Held& held, uint32_t (&first)[4],
                                                uint32_t (&second)[4]) {
    // Sixteen columns belong to two lanes.
    const int group = 2 * block + threadIdx.x % 4 / 2;
    const float scales[2] = {__uint_as_float(held.template word<0>(group)),
                             __uint_as_float(held.template word<1>(group))};
    const float minima[2] = {__uint_as_float(held.template word<2>(block)),
                             __uint_as_float(held.template word<2>(2 + block))};
    decode_words<block>(
        held, first, second, [&](auto row, uint32_t word, uint32_t& low, uint32_t& high) {
          const auto value = [&](int i) {
            return fmaf(signed_byte_to_float(word, i), scales[row.value], minima[row.value]);
          };
          low = pack_bf16x2(value(0), value(1));
          high = pack_bf16x2(value(2), value(3));
        });
  }
};

// e4m3 with a scale per 64 columns, of one row or of eight rows: the sum of two bf16 numbers, the
// larger one in the lower half of a word.
template <bool of_row>
struct Fp8CodeUnits : ByteCodeUnits<of_row ? 80 : 16> {
  using Base = ByteCodeUnits<of_row ? 80 : 16>;

  static __device__ __forceinline__ int scale_place(int, int g, int t) {
    return ((of_row ? g * 2 : 0) + t % 2) * 4;
  }

  template <int block, class Held>
  static __device__ __forceinline__ void decode(const Held& held, uint32_t (&first)[4],
                                                uint32_t (&second)[4]) {
    const uint32_t scales[2] = {held.template word<0>(0), held.template word<0>(1)};
    Base::template decode_words<block>(
        held, first, second, [&](auto row, uint32_t word, uint32_t& low, uint32_t& high) {
          low = scaled(E4m3Code::low_pair(word), scales[row.value]);
          high = scaled(E4m3Code::high_pair(word), scales[row.value]);
        });
  }

 private:
  // A value of a pair is the e4m3 value times 2^-120, the parts of a scale have the factor 2^120.
  // byte_codes.py selects parts with which two roundings give the bf16 number of one fp32 scale.
  static __device__ __forceinline__ uint32_t scaled(uint32_t pair, uint32_t scale) {
    return fma_bf16x2_by_half<0>(pair, scale, mul_bf16x2_by_half<1>(pair, scale));
  }
};
