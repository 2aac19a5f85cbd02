// Weights of quantized checkpoints: their own codes, decoded to bf16(dequantized value).
//
// The value of a code is (code - zero point) · scale, rounded once to bf16: what an engine that
// dequantizes the same checkpoint stores. Both multiply by the same numbers in the same order, so
// their results have equal bits. linear/group_codes.py describes the units.
#pragma once

#include "bf16.cuh"
#include "f16.cuh"
#include "ptx_bf16.cuh"
#include "weight_units.cuh"

// fp16 scales of rows g and g + 8 as sums of two bf16, which eleven bits of mantissa allow.
struct SplitScales {
  uint32_t high, low;

  __device__ __forceinline__ explicit SplitScales(uint32_t scales) {
    const float2 exact = unpack_f16x2(scales);
    high = pack_bf16x2(exact.x, exact.y);
    low = pack_bf16x2(exact.x - bf16_low_to_float(high), exact.y - bf16_high_to_float(high));
  }

  // Whole numbers of at most five bits times the scale of one row: by the low part exactly, by the
  // high part in the multiplication that rounds the sum.
  template <int row>
  __device__ __forceinline__ uint32_t multiply(uint32_t codes) const {
    return fma_bf16x2_by_half<row>(codes, high, mul_bf16x2_by_half<row>(codes, low));
  }
};

// A word that the lane 4g + ``from`` holds, for all four lanes of a row.
__device__ __forceinline__ uint32_t word_of_lane(uint32_t word, int from) {
  return __shfl_sync(0xFFFFFFFFu, word, (threadIdx.x & 28u) + from);
}

// Four-bit codes with an fp16 scale and a zero point for kGroup columns. A piece is a word of eight
// codes for each block and row: the code of column 2i at bits 4i, of column 2i + 1 at 16 + 4i. Of
// the words of scales and zero points each of the lanes that need them holds another.
template <int group>
struct Int4Units : CodedUnits<1, group == 32 ? 80 : 48, 1> {
  static constexpr bool kByBlock = group == 32, kApart = true;
  static constexpr int kScaleWords = kByBlock ? 2 : 1;
  using Base = CodedUnits<1, kByBlock ? 80 : 48, 1>;
  using Held = typename Base::Held;
  static_assert(group == 32 || group == 64, "a unit has 64 columns");

  template <class Load>
  static __device__ __forceinline__ void load_scales(Held& held, const unsigned char* unit,
                                                     const Load& load) {
    const int g = threadIdx.x % 32 / 4, word = min(static_cast<int>(threadIdx.x) % 4, kScaleWords);
    const int place = word < kScaleWords ? g * kScaleWords + word : kScaleWords * 8 + g / 2;
    held.scales[0] = load(Base::scales_at(unit) + place * 4);
  }

  template <int block>
  static __device__ __forceinline__ void decode(const Held& held, uint32_t (&first)[4],
                                                uint32_t (&second)[4]) {
    const uint4 codes = held.pieces[0];
    const SplitScales scales(word_of_lane(held.scales[0], kByBlock ? block : 0));
    // Two bytes for the two rows; with groups of 32 a nibble of each belongs to a block.
    const uint32_t zeros = word_of_lane(held.scales[0], kScaleWords) >> (threadIdx.x % 8 / 4 * 16);
    const uint32_t shifted = kByBlock ? zeros >> (4 * block) & 0x0F0Fu : zeros;
    uint32_t a[4], b[4];
    decode_word<0>(block ? codes.z : codes.x, shifted & 0xFFu, scales, a);
    decode_word<1>(block ? codes.w : codes.y, shifted >> 8 & 0xFFu, scales, b);
    Bf16Units::set_operand(first, a[0], b[0], a[1], b[1]);
    Bf16Units::set_operand(second, a[2], b[2], a[3], b[3]);
  }

 private:
  // 128 + code and -(128 + zero point) are exact in bf16, and so is their sum.
  template <int row>
  static __device__ __forceinline__ void decode_word(uint32_t word, uint32_t zero,
                                                     const SplitScales& scales,
                                                     uint32_t (&pairs)[4]) {
    const uint32_t offset = zero * 0x00010001u + 0xC300C300u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t codes = (word >> (4 * i) & 0x000F000Fu) | 0x43004300u;
      pairs[i] = scales.template multiply<row>(add_bf16x2(codes, offset));
    }
  }
};
