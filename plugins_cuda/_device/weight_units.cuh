// How the values of a dense weight are stored, and how a lane makes A operands of mma of them.
//
// A packed tile is 16 rows by K, cut into units of one or two blocks of 32 columns
// (linear/packing.py, linear/block_scaled.py). A unit is kLoads times 512 bytes, 16 for each lane
// 4g + t, and where values have scales 32 bytes more, 4 for each g: those of rows g and g + 8 in
// the first block, then in the second. An element is its code times 2^(scale − 127), which a bf16
// holds exactly: what is stored decides nothing but the weight's values.
//
// Instructions for a block of a tile: bf16 none, fp8 and int8 28 and two for scales, MXFP4 26 and
// two. With its mma and loads a block takes an SM's scheduler about 36 issue slots of MXFP4; at 4.5
// TB/s one comes every 63, of fp8 every 122.
#pragma once

#include "mxfp4.cuh"

constexpr int kLoadBytes = 512;

// When steps of a stream are branches of their own, for the registers that decoding takes: where
// all loads are in flight at once, or in loops too.
enum class Apart { kNever, kAllAtOnce, kAlways };

// What a lane holds of a unit: its codes, and words of scales. ``word`` is what the lane 4g + from
// has, for all four lanes of a row, and ``own`` this lane's.
template <int kLoads, int kScaleWords>
struct HeldUnit {
  uint4 pieces[kLoads];
  uint32_t scales[kScaleWords];

  template <int number>
  __device__ __forceinline__ uint32_t word(int from) const {
    return __shfl_sync(0xFFFFFFFFu, scales[number], (threadIdx.x & 28u) + from);
  }
  template <int number>
  __device__ __forceinline__ uint32_t own() const {
    return scales[number];
  }
};
template <int kLoads>
struct HeldUnit<kLoads, 0> {
  uint4 pieces[kLoads];
};

struct Bf16Units {
  static constexpr int kBlocks = 1, kLoads = 2, kBytes = kLoads * kLoadBytes;
  static constexpr bool kScaled = false;
  static constexpr Apart kApart = Apart::kNever;
  using Stored = uint16_t;
  using Held = HeldUnit<kLoads, 0>;

  template <int block, class Held>
  static __device__ __forceinline__ void decode(const Held& held, uint32_t (&first)[4],
                                                uint32_t (&second)[4]) {
    const uint4 upper = held.pieces[0], lower = held.pieces[1];
    set_operand(first, upper.x, lower.x, upper.y, lower.y);
    set_operand(second, upper.z, lower.z, upper.w, lower.w);
  }

  static __device__ __forceinline__ void set_operand(uint32_t (&to)[4], uint32_t a, uint32_t b,
                                                     uint32_t c, uint32_t d) {
    to[0] = a;
    to[1] = b;
    to[2] = c;
    to[3] = d;
  }
};

// Codes of two blocks, and scales of ``scale_bytes`` behind them, of which a lane holds some words:
// the lane 4g + t those at scale_place(number, g, t), counted in bytes from the first scale.
template <int loads, int scale_bytes, int scale_words>
struct CodedUnits {
  static constexpr int kBlocks = 2, kLoads = loads, kBytes = kLoads * kLoadBytes + scale_bytes;
  static constexpr int kScaleWords = scale_words;
  static constexpr bool kScaled = true;
  static constexpr Apart kApart = Apart::kNever;
  using Stored = unsigned char;
  using Held = HeldUnit<kLoads, scale_words>;

  // Where the scales begin of the unit of which ``unit`` is this lane's 16 bytes.
  static __device__ __forceinline__ const unsigned char* scales_at(const unsigned char* unit) {
    return unit + (kLoads * kLoadBytes - static_cast<int>(threadIdx.x) % 32 * 16);
  }
};

// Codes with a power of two for 32 columns: one byte a row and block.
template <int loads>
struct ScaledUnits : CodedUnits<loads, 32, 1> {
  static __device__ __forceinline__ int scale_place(int, int g, int) {
    return g * 4;
  }
};

// Loads this lane's words of scales; ``unit``: its 16 bytes.
template <class Units, class Load>
__device__ __forceinline__ void load_scales(typename Units::Held& held, const unsigned char* unit,
                                            const Load& load) {
  if constexpr (Units::kScaled) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < Units::kScaleWords; ++i) {
      held.scales[i] = load(Units::scales_at(unit) + Units::scale_place(i, lane / 4, lane % 4));
    }
  }
}

// e2m1 with a scale for 32 columns: a piece is both blocks of rows g and g + 8.
struct Mxfp4Units : ScaledUnits<1> {
  template <int block, class Held>
  static __device__ __forceinline__ void decode(const Held& held, uint32_t (&first)[4],
                                                uint32_t (&second)[4]) {
    const uint4 codes = held.pieces[0];
    uint32_t a[4], b[4];
    decode_word_by_half<block>(block ? codes.z : codes.x,
                               alternate_scales(held.template own<0>(), 0), a);
    decode_word_by_half<block>(block ? codes.w : codes.y,
                               alternate_scales(held.template own<0>(), 1), b);
    Bf16Units::set_operand(first, a[0], b[0], a[1], b[1]);
    Bf16Units::set_operand(second, a[2], b[2], a[3], b[3]);
  }
};

// Bytes with a scale for 32 columns: a piece is one block of rows g and g + 8.
template <class Code>
struct ByteUnits : ScaledUnits<2> {
  template <int block, class Held>
  static __device__ __forceinline__ void decode(const Held& held, uint32_t (&first)[4],
                                                uint32_t (&second)[4]) {
    const uint4 codes = held.pieces[block];
    const uint32_t upper = scales_of(held.template own<0>(), 0),
                   lower = scales_of(held.template own<0>(), 1);
    uint32_t a[4], b[4];
    decode_pairs<block>(codes.x, upper, a[0], a[1]);
    decode_pairs<block>(codes.y, upper, a[2], a[3]);
    decode_pairs<block>(codes.z, lower, b[0], b[1]);
    decode_pairs<block>(codes.w, lower, b[2], b[3]);
    Bf16Units::set_operand(first, a[0], b[0], a[1], b[1]);
    Bf16Units::set_operand(second, a[2], b[2], a[3], b[3]);
  }

 private:
  // What Code's pairs are multiplied by, of bytes ``odd`` and ``odd`` + 2, in the low and the high
  // half.
  static __device__ __forceinline__ uint32_t scales_of(uint32_t scales, int odd) {
    return __byte_perm(scales, 0u, 0x4240u + 0x101u * odd) * 128u + Code::kScaleBits;
  }

  // Four codes times a scale.
  template <int half>
  static __device__ __forceinline__ void decode_pairs(uint32_t word, uint32_t scales, uint32_t& low,
                                                      uint32_t& high) {
    low = mul_bf16x2_by_half<half>(Code::low_pair(word), scales);
    high = mul_bf16x2_by_half<half>(Code::high_pair(word), scales);
  }
};

// An e4m3's sign at bit 15 and its other bits at 10:4 of a half are e4m3 · 2^-120 in bf16,
// subnormal or not. Its multiplier is 2^(scale − 7).
struct E4m3Code {
  static constexpr uint32_t kScaleBits = 0x3C003C00u;

  static __device__ __forceinline__ uint32_t low_pair(uint32_t word) {
    return word & 0x87F087F0u;
  }
  static __device__ __forceinline__ uint32_t high_pair(uint32_t word) {
    const uint32_t turned = (word >> 4) | (word << 28);
    return (turned & 0x87808780u) | ((word << 4) & 0x00700070u);
  }
};
using Fp8Units = ByteUnits<E4m3Code>;

// A sign at bit 15 and a magnitude at 6:0 of a half are a subnormal bf16, the magnitude times
// 2^-133. Its multiplier is 2^(scale − 127).
struct Int8Code {
  static constexpr uint32_t kScaleBits = 0u;

  static __device__ __forceinline__ uint32_t low_pair(uint32_t word) {
    return word & 0x807F807Fu;
  }
  static __device__ __forceinline__ uint32_t high_pair(uint32_t word) {
    return ((word >> 8) & 0x007F007Fu) | ((word << 8) & 0x80008000u);
  }
};
using Int8Units = ByteUnits<Int8Code>;
