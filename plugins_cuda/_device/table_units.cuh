// Weights whose four-bit values are places in a table (linear/table_codes.py).
//
// As in nibble_units.cuh, a value is dequantized as by the checkpoint, and rounded once to bf16.
#pragma once

#include "nibble_units.cuh"

// Bytes 128 + value of IQ4_NL's table. The lower half of ``places`` has the lower three bits of
// four places, one per nibble; ``halves`` selects bytes 0 to 3 in order, plus 4 in the upper half
// of the table.
__device__ __forceinline__ uint32_t iq4_bytes(uint32_t places, uint32_t halves) {
  return __byte_perm(__byte_perm(0x3F2D1801u, 0x766A5D4Fu, places),
                     __byte_perm(0xA6998D81u, 0xF1D9C5B5u, places), halves);
}

// IQ4_NL and IQ4_XS: a place in the table, and an fp32 scale per 32 columns.
struct Iq4Units : NibbleUnits<160, 1> {
  static __device__ __forceinline__ int scale_place(int, int g, int t) {
    return (g * 4 + t) * 4;
  }

  template <int block, class Held>
  static __device__ __forceinline__ void decode(const Held& held, uint32_t (&first)[4],
                                                uint32_t (&second)[4]) {
    const float scales[2] = {__uint_as_float(held.template word<0>(2 * block)),
                             __uint_as_float(held.template word<0>(2 * block + 1))};
    decode_words<block>(held, first, second, [&](auto row, uint32_t word, uint32_t (&pairs)[4]) {
      const uint32_t places = word & 0x77777777u;
      const uint32_t halves = (word >> 1 & 0x44444444u) | 0x32103210u;
      const float scale = scales[row.value];
      // Bytes 0 and 2 are a pair, and bytes 1 and 3. As the lowest bits of fp16 1024, they are
      // 1152 + value. Products with 1152 are exact: a scale has at most 16 bits.
      const float offset = -1152.0f * scale;
      const auto pair_of = [&](uint32_t bytes) {
        const float2 value = unpack_f16x2((bytes & 0x00FF00FFu) | 0x64006400u);
        return pack_bf16x2(fmaf(value.x, scale, offset), fmaf(value.y, scale, offset));
      };
      const uint32_t low = iq4_bytes(places, halves);
      const uint32_t high = iq4_bytes(places >> 16, halves >> 16);
      pairs[0] = pair_of(low);
      pairs[1] = pair_of(low >> 8);
      pairs[2] = pair_of(high);
      pairs[3] = pair_of(high >> 8);
    });
  }
};

// NVFP4: e2m1, an e4m3 scale per 16 columns, and a factor of eight rows.
struct Nvfp4Units : NibbleUnits<112, 2> {
  // A word of the scales of each row, and two of the factor of each.
  static __device__ __forceinline__ int scale_place(int number, int g, int t) {
    return number == 0 ? (g * 2 + t % 2) * 4 : 64 + t * 4;
  }

  template <int block, class Held>
  static __device__ __forceinline__ void decode(const Held& held, uint32_t (&first)[4],
                                                uint32_t (&second)[4]) {
    // Sixteen columns belong to two lanes.
    const int group = 2 * block + threadIdx.x % 4 / 2;
    const auto scale_of = [&](int row) {
      // The e4m3 value times 2^-120; the factor is stored times 2^120, in two parts. Their product,
      // rounded once, is the scale of the checkpoint. A value of a pair is twice the e2m1 value
      // times 2^-127.
      const uint32_t code = held.template word<0>(row) >> (8 * group) & 0x7Fu;
      const float value = __uint_as_float(code << 20);
      const float high = __uint_as_float(held.template word<1>(2 * row));
      const float low = __uint_as_float(held.template word<1>(2 * row + 1));
      return fmaf(value, high, value * low) * 1.7014118346046923e38f;
    };
    const float scales[2] = {scale_of(0), scale_of(1)};
    decode_words<block>(held, first, second, [&](auto row, uint32_t word, uint32_t (&pairs)[4]) {
      place_word(word, pairs);
#pragma unroll
      for (uint32_t& pair : pairs) pair = scaled_pair(pair, scales[row.value]);
    });
  }
};
