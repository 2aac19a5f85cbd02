// Weights with four bits of each value in a word, and further bits after them
// (linear/nibble_codes.py).
//
// A value is dequantized in fp32 and rounded once to bf16, as in an engine that stores the
// dequantized checkpoint. Both engines multiply the same numbers in the same order, so their
// results are equal bit for bit.
#pragma once

#include "code_arithmetic.cuh"

// The four pairs of a word as 128 + value, exact in bf16.
template <int pair>
__device__ __forceinline__ uint32_t nibble_pair(uint32_t word) {
  return (word >> (4 * pair) & 0x000F000Fu) | 0x43004300u;
}

// The four pairs of a word as subnormal fp16 numbers. The values of odd pairs are four bits higher,
// which saves shifts: two pairs share one.
template <int pair>
__device__ __forceinline__ uint32_t nibble_units(uint32_t word) {
  return word >> (8 * (pair / 2)) & (pair % 2 ? 0x00F000F0u : 0x000F000Fu);
}

// A scale for the values of such pairs. Powers of two are exact factors, so that a product and its
// rounding are those of the value and the scale.
struct UnitScale {
  float even, odd;

  __device__ __forceinline__ explicit UnitScale(float of_units)
      : even(of_units), odd(of_units * 0.0625f) {}
  template <int pair>
  __device__ __forceinline__ float of() const {
    return pair % 2 ? odd : even;
  }
};

// Units of one piece: a word of eight values for each block and row.
template <int scale_bytes, int scale_words>
struct NibbleUnits : QuantizedUnits<1, scale_bytes, scale_words> {
  static constexpr SeparateSteps kSeparateSteps = SeparateSteps::kAlways;

  // Call of_word<row>(values of a row in this block, pairs) for both rows.
  template <int block, class Held, class OfWord>
  static __device__ __forceinline__ void decode_words(const Held& held, uint32_t (&first)[4],
                                                      uint32_t (&second)[4],
                                                      const OfWord& of_word) {
    const uint4 codes = held.pieces[0];
    uint32_t a[4], b[4];
    of_word(Row<0>(), block ? codes.z : codes.x, a);
    of_word(Row<1>(), block ? codes.w : codes.y, b);
    Bf16Units::set_operand(first, a[0], b[0], a[1], b[1]);
    Bf16Units::set_operand(second, a[2], b[2], a[3], b[3]);
  }
};

// With a scale (fp16 or bf16) and a zero point per ``group`` columns.
template <int group, class Scales = SplitScales>
struct Int4Units : NibbleUnits<(group == 32 ? 80 : 48) + Scales::kFreeBytes, 1> {
  using Base = NibbleUnits<(group == 32 ? 80 : 48) + Scales::kFreeBytes, 1>;
  static constexpr SeparateSteps kSeparateSteps = SeparateSteps::kAllAtOnce;
  static constexpr bool kByBlock = group == 32;
  static constexpr int kRowWords = kByBlock ? 2 : 1;  // of scales
  static_assert(group == 32 || group == 64, "a unit has 64 columns");

  static __device__ __forceinline__ int scale_place(int, int g, int t) {
    return (t < kRowWords ? g * kRowWords + t : kRowWords * 8 + g / 2) * 4;
  }

  template <int block, class Held>
  static __device__ __forceinline__ void decode(const Held& held, uint32_t (&first)[4],
                                                uint32_t (&second)[4]) {
    const Scales scales(held.template word<0>(kByBlock ? block : 0));
    // One byte for each of the two rows; with groups of 32, each nibble belongs to a block.
    uint32_t zeros = held.template word<0>(kRowWords) >> (threadIdx.x % 8 / 4 * 16);
    if (kByBlock) zeros = zeros >> (4 * block) & 0x0F0Fu;
    Base::template decode_words<block>(
        held, first, second, [&](auto row, uint32_t word, uint32_t (&pairs)[4]) {
          // -(128 + zero point) is exact in bf16, and so is its sum with 128 + value.
          const uint32_t offset = (zeros >> (8 * row.value) & 0xFFu) * 0x00010001u + 0xC300C300u;
          each_pair([&](auto i) {
            const uint32_t codes = add_bf16x2(nibble_pair<decltype(i)::value>(word), offset);
            pairs[i.value] = scales.template multiply<decltype(row)::value>(codes);
          });
        });
  }
};

// Four bits without zero points, and a bf16 scale per 64 columns. (q - 8) * scale is one fma of q.
// At bits 7:4 of a bf16 number, q is q * 2^-129: bit 7 belongs to the exponent, but subnormal
// numbers and those of the lowest exponent have the same units. The stored scale has the factor
// 2^129.
struct SymmetricUnits : NibbleUnits<32, 1> {
  static constexpr SeparateSteps kSeparateSteps = SeparateSteps::kAllAtOnce;

  static __device__ __forceinline__ int scale_place(int, int g, int) {
    return g * 4;
  }

  template <int block, class Held>
  static __device__ __forceinline__ void decode(const Held& held, uint32_t (&first)[4],
                                                uint32_t (&second)[4]) {
    const uint32_t scales = held.template own<0>();
    // Times -2^-126: minus eight scales, exact.
    const uint32_t offsets = mul_bf16x2(scales, 0x80808080u);
    decode_words<block>(held, first, second, [&](auto row, uint32_t word, uint32_t (&pairs)[4]) {
      each_pair([&](auto i) {
        const uint32_t codes = shifted<4 - 4 * decltype(i)::value>(word) & 0x00F000F0u;
        pairs[i.value] = fma_bf16x2_by_halves<decltype(row)::value>(codes, scales, offsets);
      });
    });
  }
};

// The fifth bits of a pair, in place; they are the lane's word 1.
template <int block, int row, int pair, class Held>
__device__ __forceinline__ uint32_t fifth_bits(const Held& held) {
  constexpr int place = pair + 4 * row + 8 * block, to = pair % 2 ? 8 : 4;
  return shifted<to - place>(held.template own<1>()) & (0x00010001u << to);
}

// The values of a pair of four or five bits, as nibble_units().
template <bool fifth, int block, int row, int pair, class Held>
__device__ __forceinline__ uint32_t few_bits(const Held& held, uint32_t word) {
  if constexpr (fifth) return nibble_units<pair>(word) | fifth_bits<block, row, pair>(held);
  return nibble_units<pair>(word);
}

// Q4_1 and Q5_1: an fp16 scale and an fp16 minimum per 32 columns.
template <int bits>
struct MinimumUnits : NibbleUnits<bits == 5 ? 272 : 144, bits == 5 ? 2 : 1> {
  using Base = NibbleUnits<bits == 5 ? 272 : 144, bits == 5 ? 2 : 1>;
  static constexpr bool kFifth = bits == 5;

  static __device__ __forceinline__ int scale_place(int number, int g, int t) {
    return (kFifth && number == 0 ? 128 : 0) + (g * 4 + t) * 4;
  }

  template <int block, class Held>
  static __device__ __forceinline__ void decode(const Held& held, uint32_t (&first)[4],
                                                uint32_t (&second)[4]) {
    const float2 scales = unpack_f16x2(held.template word<0>(block));
    const float2 minima = unpack_f16x2(held.template word<0>(2 + block));
    Base::template decode_words<block>(
        held, first, second, [&](auto row, uint32_t word, uint32_t (&pairs)[4]) {
          const UnitScale scale((row.value ? scales.y : scales.x) * kUnitsOfF16);
          const float minimum = row.value ? minima.y : minima.x;
          each_pair([&](auto i) {
            constexpr int pair = decltype(i)::value;
            pairs[pair] =
                fused_pair(few_bits<kFifth, block, decltype(row)::value, pair>(held, word),
                           scale.template of<pair>(), minimum);
          });
        });
  }
};

// Q4_K and Q5_K: an fp16 scale and minimum per 256 columns, and a multiple of each per 32
// columns.
template <int bits>
struct KUnits : NibbleUnits<bits == 5 ? 256 : 128, bits == 5 ? 2 : 1> {
  using Base = NibbleUnits<bits == 5 ? 256 : 128, bits == 5 ? 2 : 1>;
  static constexpr bool kFifth = bits == 5;

  // Lanes 0 and 1 hold scale and minimum of the two rows, lanes 2 and 3 the multiples.
  static __device__ __forceinline__ int scale_place(int number, int g, int t) {
    if (number == 1) return (g * 4 + t) * 4;
    return (kFifth ? 128 : 0) + t / 2 * 64 + (g * 2 + t % 2) * 4;
  }

  template <int block, class Held>
  static __device__ __forceinline__ void decode(const Held& held, uint32_t (&first)[4],
                                                uint32_t (&second)[4]) {
    // Lane t computes the numbers of row t % 2 in block t / 2. Products of 11 and 6 bits are exact.
    const int own = threadIdx.x % 2, of = threadIdx.x % 4 / 2;
    const float2 of_unit = unpack_f16x2(held.template word<0>(own));
    const uint32_t multiples = held.template word<0>(2 + own);
    const float scale = of_unit.x * kUnitsOfF16 * byte_to_float(multiples, of);
    const float minimum = of_unit.y * byte_to_float(multiples, 2 + of);
    const UnitScale scales[2] = {UnitScale(float_of_lane(scale, 2 * block)),
                                 UnitScale(float_of_lane(scale, 2 * block + 1))};
    const float minima[2] = {float_of_lane(minimum, 2 * block),
                             float_of_lane(minimum, 2 * block + 1)};
    Base::template decode_words<block>(
        held, first, second, [&](auto row, uint32_t word, uint32_t (&pairs)[4]) {
          each_pair([&](auto i) {
            constexpr int pair = decltype(i)::value;
            pairs[pair] =
                fused_pair(few_bits<kFifth, block, decltype(row)::value, pair>(held, word),
                           scales[row.value].template of<pair>(), minima[row.value]);
          });
        });
  }
};

// Q6_K: six bits, an fp16 scale per 256 columns and a multiple of it per 16 columns. With minima
// (an fp16 number per 256 columns and a multiple of it per 32), it can also hold other K-quants.
template <bool minima>
struct SixBitUnits : NibbleUnits<minima ? 416 : 352, minima ? 4 : 3> {
  using Base = NibbleUnits<minima ? 416 : 352, minima ? 4 : 3>;

  // Two words of further bits, then one word: lanes 0 and 1 hold the multiples of the two rows,
  // lane 2 both scales, lane 3 both minima. The last word has the multiples of the minima.
  static __device__ __forceinline__ int scale_place(int number, int g, int t) {
    if (number < 2) return (g * 4 + t) * 8 + number * 4;
    if (number == 3) return 384 + g * 4;
    return 256 + (t < 2 ? (g * 2 + t) * 4 : 64 + (minima ? t - 2 : 0) * 32 + g * 4);
  }

  template <int block, class Held>
  static __device__ __forceinline__ void decode(const Held& held, uint32_t (&first)[4],
                                                uint32_t (&second)[4]) {
    const float2 of_block = unpack_f16x2(held.template word<2>(2));
    // Sixteen columns belong to two lanes; products of 11 and 8 bits are exact.
    const int group = 2 * block + threadIdx.x % 4 / 2;
    const auto scale_of = [&](int row, float scale) {
      return scale * kUnitsOfF16 * signed_byte_to_float(held.template word<2>(row), group);
    };
    const UnitScale scales[2] = {UnitScale(scale_of(0, of_block.x)),
                                 UnitScale(scale_of(1, of_block.y))};
    // Values are 32 less than their bits. Without minima, 32 times a scale is an exact addend.
    float addends[2];
    if constexpr (minima) {
      const float2 unit_minima = unpack_f16x2(held.template word<2>(3));
      const uint32_t multiples = held.template own<3>();
      addends[0] = unit_minima.x * byte_to_float(multiples, block);
      addends[1] = unit_minima.y * byte_to_float(multiples, 2 + block);
    } else {
      addends[0] = scales[0].even * (-32.0f / kUnitsOfF16);
      addends[1] = scales[1].even * (-32.0f / kUnitsOfF16);
    }
    Base::template decode_words<block>(
        held, first, second, [&](auto row, uint32_t word, uint32_t (&pairs)[4]) {
          each_pair([&](auto i) {
            constexpr int pair = decltype(i)::value, to = pair % 2 ? 8 : 4;
            constexpr int place = 2 * pair + 8 * decltype(row)::value;
            const uint32_t high =
                shifted<to - place>(held.template own<block>()) & (0x00030003u << to);
            uint32_t codes = nibble_units<pair>(word) | high;
            if constexpr (minima) codes = sub_f16x2(codes, 0x00020002u << to);
            pairs[pair] =
                fused_pair(codes, scales[row.value].template of<pair>(), addends[row.value]);
          });
        });
  }
};
using Q6KUnits = SixBitUnits<false>;
