// MXFP4 weights on the tensor cores: a warp streams tiles of 16 mma rows through a private ring in
// shared memory and decodes them into the A operand of mma.m16n8k16.
//
// The form in memory is that of plugins_cuda/rms_moe/packing.py: a tile is stages of up to 15 steps
// (16 mma rows × 32 columns), a stage is 256 bytes of codes a step and 256 bytes of scales.
#pragma once

#include "bf16.cuh"
#include "ptx.cuh"
#include "ptx_mxfp4.cuh"
#include "types.cuh"

constexpr int kStageSteps = 15;
constexpr int kStepBytes = 256;
constexpr int kStageBytes = kStepBytes * (kStageSteps + 1);

// 2^(scale − 1) of bytes ``odd`` and ``odd`` + 2 of four scales, in the low and the high half:
// bf16's exponent field is scale + 126.
__device__ __forceinline__ uint32_t alternate_scales(uint32_t scales, int odd) {
  return __byte_perm(scales, 0u, 0x4240u + 0x101u * odd) * 128u + 0x3F003F00u;
}

__device__ __forceinline__ void set_words(uint32_t (&words)[4], uint4 v) {
  words[0] = v.x;
  words[1] = v.y;
  words[2] = v.z;
  words[3] = v.w;
}

// Eight codes → four bf16 pairs of e2m1's bits at 8:6 of a half: e2m1 · 2^-126, subnormal for ±0.5.
// Nine instructions, because the packing put the bits where three masks and a merge suffice.
__device__ __forceinline__ void place_word(uint32_t word, uint32_t (&pairs)[4]) {
  constexpr uint32_t kPair = 0x81C081C0u;
  pairs[0] = word & kPair;
  pairs[1] = (word << 6) & kPair;
  pairs[2] = ((word >> 4) | (word << 28)) & kPair;
  pairs[3] = ((word << 2) & 0x80C080C0u) | ((word >> 6) & 0x01000100u);
}

// Eight codes times the scale in both halves of ``scale`` (2^(scale − 1)), exactly.
__device__ __forceinline__ void decode_word(uint32_t word, uint32_t scale, uint32_t (&pairs)[4]) {
  place_word(word, pairs);
#pragma unroll
  for (uint32_t& pair : pairs) pair = mul_bf16x2(pair, scale);
}

// The same with the scale in one half of ``scales``.
template <int half>
__device__ __forceinline__ void decode_word_by_half(uint32_t word, uint32_t scales,
                                                    uint32_t (&pairs)[4]) {
  place_word(word, pairs);
#pragma unroll
  for (uint32_t& pair : pairs) pair = mul_bf16x2_by_half<half>(pair, scales);
}

// A step of a tile as A operands: at columns 8t … 8t+3 and 8t+4 … 8t+7 of its 32, t = lane % 4.
struct StepOperands {
  uint32_t low[4], high[4];
};

// One warp: ``step(index, operands)`` for each of the ``count`` steps of a stage in shared memory,
// in order, where neighbouring stages are those of ``tiles`` tiles: operands of each.
template <int count, int tiles, class Step>
__device__ __forceinline__ void decode_stage(const unsigned char* stage, int first_step,
                                             Step&& step) {
  const int lane = threadIdx.x % 32;
  uint32_t upper_scales[tiles][4], lower_scales[tiles][4];
#pragma unroll
  for (int tile = 0; tile < tiles; ++tile) {
    const unsigned char* scales = stage + tile * kStageBytes + count * kStepBytes + lane / 4 * 16;
    set_words(upper_scales[tile], *reinterpret_cast<const uint4*>(scales));
    set_words(lower_scales[tile], *reinterpret_cast<const uint4*>(scales + 128));
  }
  uint32_t upper_pairs[tiles][2], lower_pairs[tiles][2];
#pragma unroll
  for (int i = 0; i < count; ++i) {
    StepOperands operands[tiles];
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      uint32_t& upper = upper_pairs[tile][i % 2];
      uint32_t& lower = lower_pairs[tile][i % 2];
      if (i % 4 < 2) {
        upper = alternate_scales(upper_scales[tile][i / 4], i % 2);
        lower = alternate_scales(lower_scales[tile][i / 4], i % 2);
      }
      const uint2 codes =
          *reinterpret_cast<const uint2*>(stage + tile * kStageBytes + i * kStepBytes + lane * 8);
      uint32_t a[4], b[4];
      if (i % 4 < 2) {
        decode_word_by_half<0>(codes.x, upper, a);
        decode_word_by_half<0>(codes.y, lower, b);
      } else {
        decode_word_by_half<1>(codes.x, upper, a);
        decode_word_by_half<1>(codes.y, lower, b);
      }
      operands[tile] = {{a[0], b[0], a[1], b[1]}, {a[2], b[2], a[3], b[3]}};
    }
    step(first_step + i, operands);
  }
}

// How a tile of ``steps`` steps is cut.
template <int steps>
struct TileCut {
  static constexpr int kFullStages = steps / kStageSteps;
  static constexpr int kTailSteps = steps % kStageSteps;
  static constexpr int kStages = kFullStages + (kTailSteps > 0);
  static constexpr int kTileBytes = kStepBytes * (steps + kStages);

  static __device__ __forceinline__ uint32_t stage_bytes(int stage) {
    const bool tail = kTailSteps > 0 && stage == kFullStages;
    return tail ? kStepBytes * (kTailSteps + 1) : kStageBytes;
  }
};

// The groups ``first``, ``first + stride``, … below ``end`` of one warp, in order; a group is
// ``tiles`` tiles that are neighbours in memory and advance together, so that what the warp reads
// of the activations serves all of them. ``TileOf`` maps a group to its first tile's address;
// copies run ahead over the end of a group into the next.
//
// Shared memory of the warp: ``ring`` of ring_stages × tiles × 4096 bytes aligned to 128, and
// ring_stages barriers. init() first, then a __syncthreads(), then start().
template <int steps, int ring_stages, int tiles, class TileOf>
class TileStream {
 public:
  using Cut = TileCut<steps>;
  static constexpr int kSlotBytes = tiles * kStageBytes;
  static constexpr int kRingBytes = ring_stages * kSlotBytes;

  __device__ __forceinline__ TileStream(unsigned char* ring, Mbarrier* full, TileOf tile_of)
      : ring_(ring), full_(full), tile_of_(tile_of), lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ void init() {
    if (lane_ == 0) {
      for (int i = 0; i < ring_stages; ++i) mbarrier_init(full_ + i, 1);
      mbarrier_init_fence();
    }
  }

  __device__ __forceinline__ void start(int first, int end, int stride) {
    next_ = first;
    end_ = end;
    stride_ = stride;
    if (next_ < end_) source_ = tile_of_(next_);
#pragma unroll 1
    for (int i = 0; i < ring_stages; ++i) request(i);
  }

  // ``step`` as in decode_stage, for every step of the next group, in order.
  template <class Step>
  __device__ __forceinline__ void group(Step&& step) {
#pragma unroll 1
    for (int stage = 0; stage < Cut::kFullStages; ++stage) {
      consume<kStageSteps>(stage * kStageSteps, step);
    }
    if constexpr (Cut::kTailSteps > 0) {
      consume<Cut::kTailSteps>(Cut::kFullStages * kStageSteps, step);
    }
  }

 private:
  // Copies the next stage of each tile, if there is one, into a free slot of the ring.
  __device__ __forceinline__ void request(int slot) {
    if (next_ >= end_) return;
    const uint32_t bytes = Cut::stage_bytes(stage_);
    if (lane_ == 0) {
      mbarrier_expect_bytes(full_ + slot, tiles * bytes);
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile) {
        bulk_copy_to_shared(ring_ + slot * kSlotBytes + tile * kStageBytes,
                            source_ + tile * Cut::kTileBytes, bytes, full_ + slot);
      }
    }
    source_ += bytes;
    if (++stage_ == Cut::kStages) {
      stage_ = 0;
      next_ += stride_;
      if (next_ < end_) source_ = tile_of_(next_);
    }
  }

  template <int count, class Step>
  __device__ __forceinline__ void consume(int first_step, Step&& step) {
    mbarrier_wait(full_ + slot_, parity_);
    decode_stage<count, tiles>(ring_ + slot_ * kSlotBytes, first_step, step);
    // Every lane has read the slot before it is filled again.
    __syncwarp();
    request(slot_);
    if (++slot_ == ring_stages) {
      slot_ = 0;
      parity_ ^= 1;
    }
  }

  unsigned char* ring_;
  Mbarrier* full_;
  TileOf tile_of_;
  int lane_;
  const unsigned char* source_ = nullptr;
  int next_ = 0, end_ = 0, stride_ = 0, stage_ = 0;
  int slot_ = 0;
  uint32_t parity_ = 0;
};
