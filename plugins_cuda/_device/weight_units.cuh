// The storage formats of dense weights, and how a lane decodes them to A operands of mma.
//
// A packed tile is 16 rows × K, divided into units of one or two blocks of 32 columns
// (linear/packing.py, linear/block_scaled.py). A unit is kLoads times 512 bytes, 16 for each lane
// 4g + t. Scales add 32 bytes, 4 for each g: those of rows g and g + 8 in the first block, then in
// the second. An element is its quantized value times 2^(scale − 127), exact in bf16. The format
// therefore affects nothing but the values of the weight.
//
// Instructions per block of a tile: none for bf16, 28 and two for scales for fp8 and int8, 26 and
// two for MXFP4. With mma and loads, a block of MXFP4 takes about 36 issue slots of an SM's
// scheduler. At 4.5 TB/s, an MXFP4 block arrives every 63 slots, an fp8 block every 122.
#pragma once

#include "mxfp4.cuh"

constexpr int kLoadBytes = 512;

// When the steps of a stream are separate branches, to limit the registers of decoding: never, if
// all loads are in flight at once, or also in loops.
enum class SeparateSteps { kNever, kAllAtOnce, kAlways };

// The part of a unit in a lane: its values, and words of scales. ``word`` returns the word of lane
// 4g + from to all four lanes of a row, ``own`` that of this lane.
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
  static constexpr SeparateSteps kSeparateSteps = SeparateSteps::kNever;
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

// Two blocks of values, followed by ``scale_bytes`` of scales. Lane 4g + t holds some words of
// these, at scale_place(number, g, t), in bytes from the first scale.
template <int loads, int scale_bytes, int scale_words>
struct QuantizedUnits {
  static constexpr int kBlocks = 2, kLoads = loads, kBytes = kLoads * kLoadBytes + scale_bytes;
  static constexpr int kScaleWords = scale_words;
  static constexpr bool kScaled = true;
  static constexpr SeparateSteps kSeparateSteps = SeparateSteps::kNever;
  using Stored = unsigned char;
  using Held = HeldUnit<kLoads, scale_words>;

  // The scales of a unit; ``unit`` is the address of this lane's 16 bytes.
  static __device__ __forceinline__ const unsigned char* scales_at(const unsigned char* unit) {
    return unit + (kLoads * kLoadBytes - static_cast<int>(threadIdx.x) % 32 * 16);
  }
};

// Values with a power of two per 32 columns: one byte per row and block.
template <int loads>
struct ScaledUnits : QuantizedUnits<loads, 32, 1> {
  static __device__ __forceinline__ int scale_place(int, int g, int) {
    return g * 4;
  }
};

// Load this lane's words of scales; ``unit`` is the address of its 16 bytes.
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

// e2m1 with a scale per 32 columns: a piece has both blocks of rows g and g + 8.
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

// Bytes with a scale per 32 columns: a piece has one block of rows g and g + 8.
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
  // The multipliers of pairs of Code, of bytes ``odd`` and ``odd`` + 2, in the two halves.
  static __device__ __forceinline__ uint32_t scales_of(uint32_t scales, int odd) {
    return __byte_perm(scales, 0u, 0x4240u + 0x101u * odd) * 128u + Code::kScaleBits;
  }

  // Multiply four values by a scale.
  template <int half>
  static __device__ __forceinline__ void decode_pairs(uint32_t word, uint32_t scales, uint32_t& low,
                                                      uint32_t& high) {
    low = mul_bf16x2_by_half<half>(Code::low_pair(word), scales);
    high = mul_bf16x2_by_half<half>(Code::high_pair(word), scales);
  }
};

// The sign of an e4m3 at bit 15 and its other bits at 10:4 of a half are e4m3 · 2^-120 in bf16,
// even if it is subnormal. The multiplier is 2^(scale − 7).
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
// 2^-133. The multiplier is 2^(scale − 127).
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
