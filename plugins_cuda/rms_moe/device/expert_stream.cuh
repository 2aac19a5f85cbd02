// A warp's stream of packed tiles (plugins_cuda/rms_moe/packing.py), in MXFP4, bf16 or units of
// quantized values (stored_weights.cuh), through a private ring in shared memory into A operands of
// mma.m16n8k16.
#pragma once

#include "../../_device/mxfp4.cuh"
#include "../../_device/stored_weights.cuh"
#include "../../_device/weight_ring.cuh"

// A step of a tile as A operands: at columns 8t … 8t+3 and 8t+4 … 8t+7 of its 32, t = lane % 4.
struct StepOperands {
  uint32_t low[4], high[4];
};

// Bytes of mma rows 0 … 7 of a bf16 step, 16 per lane; rows 8 … 15 follow.
constexpr int kHalfStepBytes = 512;

// How a tile of ``steps`` steps is cut into stages of at most kStageBytes. Stages of MXFP4 begin
// with scales. Units of quantized values have two steps and their own scales. ``weights`` is the
// code of a storage (linear/storage.py).
template <int steps, int weights>
struct TileCut {
  using Units = typename WeightUnits<weights>::Units;
  static constexpr bool kBf16 = weights == 0, kMxfp4 = weights == 2;
  static constexpr bool kInUnits = !kBf16 && !kMxfp4;
  static constexpr int kUnitSteps = kInUnits ? 2 : 1;
  static constexpr int kUnitBytes = kBf16    ? 2 * kHalfStepBytes
                                    : kMxfp4 ? kStepBytes
                                             : Units::kBytes;
  static constexpr int kOfStage = kMxfp4 ? kStageSteps : kStageBytes / kUnitBytes * kUnitSteps;
  static constexpr int kScaleBytes = kMxfp4 ? kStepBytes : 0;
  static constexpr int kFullStages = steps / kOfStage;
  static constexpr int kTailSteps = steps % kOfStage;
  static constexpr int kStages = kFullStages + (kTailSteps > 0);

  static constexpr __device__ __forceinline__ int bytes_of(int count) {
    return kUnitBytes * (kInUnits ? ceil_div(count, kUnitSteps) : count);
  }
  static constexpr int kTileBytes = bytes_of(steps) + kScaleBytes * kStages;

  static __device__ __forceinline__ int stage_steps(int stage) {
    return kTailSteps > 0 && stage == kFullStages ? kTailSteps : kOfStage;
  }
};

// The groups ``first``, ``first + stride``, … below ``end`` of one warp, in order. A group is
// kTiles tiles that are adjacent in memory and advance together, so they share the warp's loads of
// activations. ``TileOf`` maps a group to the address of its first tile. Copies run ahead past the
// end of a group into the next.
//
// With ``slices`` above 1, this number of adjacent warps share a group: warp w streams slice w %
// slices of its K, a run of whole stages.
//
// The ring holds kRingStages stages of each tile. A stage has kPieces pieces; a piece that has been
// read is replaced by the same piece of a later stage. With more pieces, less of the ring is empty
// or waits to be read, so even a ring of one stage keeps most of it in flight.
//
// Shared memory of the warp: ``ring`` of kRingBytes aligned to 128, and the barriers. Call init(),
// then __syncthreads(), then start().
//
// C: kWeights, kRingStages, kPieces, kTiles, and kRows and kPassRows. If one pass covers all rows,
// no weight is read twice: L2 then retains caches, activations and partial sums instead of weights.
template <class C, int steps, class TileOf, int slices = 1>
class TileStream {
 public:
  using Cut = TileCut<steps, C::kWeights>;
  static constexpr int kSlotBytes = C::kTiles * kStageBytes;
  static constexpr int kRingBytes = C::kRingStages * kSlotBytes;
  static constexpr int kPieceSteps = Cut::kOfStage / C::kPieces;
  static constexpr bool kReadOnce = C::kRows <= C::kPassRows;
  static constexpr int kSliceStages = ceil_div(Cut::kStages, slices);
  static_assert(Cut::kOfStage % C::kPieces == 0 && C::kRingStages * C::kPieces <= 32,
                "parities are one word");
  static_assert(!Cut::kInUnits || C::kPieces == 1, "units are not cut");
  static_assert(kSliceStages * (slices - 1) < Cut::kStages, "every slice has a stage");

  struct Barriers {
    Mbarrier full[C::kRingStages][C::kPieces];
  };

  __device__ __forceinline__ TileStream(unsigned char* ring, Barriers& barriers, TileOf tile_of)
      : ring_(ring), barriers_(barriers), tile_of_(tile_of), lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ void init() {
    if (lane_ == 0) {
      for (int i = 0; i < C::kRingStages * C::kPieces; ++i)
        mbarrier_init(&barriers_.full[0][0] + i, 1);
      mbarrier_init_fence();
    }
  }

  __device__ __forceinline__ void start(int first, int end, int stride) {
    next_ = first;
    end_ = end;
    stride_ = stride;
    begin_group();
#pragma unroll 1
    for (int slot = 0; slot < C::kRingStages; ++slot) {
      request_from(0, slot);
      advance();
    }
  }

  // ``step(index, operands)`` for every step of the next group, in order.
  template <class Step>
  __device__ __forceinline__ void group(Step&& step) {
    if constexpr (Cut::kInUnits) {
#pragma unroll 1
      for (int stage = first_stage(); stage < end_stage(); ++stage) {
        consume_units(stage * Cut::kOfStage, Cut::stage_steps(stage), step);
      }
      return;
    }
    const int end = min(end_stage(), Cut::kFullStages);
#pragma unroll 1
    for (int stage = first_stage(); stage < end; ++stage) {
      consume<Cut::kOfStage>(stage * Cut::kOfStage, step);
    }
    if constexpr (Cut::kTailSteps > 0) {
      if (end_stage() == Cut::kStages) {
        consume<Cut::kTailSteps>(Cut::kFullStages * Cut::kOfStage, step);
      }
    }
  }

 private:
  // The stages of this warp's slice.
  static __device__ __forceinline__ int first_stage() {
    if constexpr (slices == 1) return 0;
    return threadIdx.x / 32 % slices * kSliceStages;
  }
  static __device__ __forceinline__ int end_stage() {
    if constexpr (slices == 1) return Cut::kStages;
    return min(first_stage() + kSliceStages, Cut::kStages);
  }
  // Move to the first stage of the group ``next_``, if there is one.
  __device__ __forceinline__ void begin_group() {
    constexpr int kWholeStageBytes = Cut::bytes_of(Cut::kOfStage) + Cut::kScaleBytes;
    stage_ = first_stage();
    source_ = next_ < end_ ? tile_of_(next_) + stage_ * kWholeStageBytes : nullptr;
  }
  // Copy piece ``piece`` of the stage at ``source_``, if any; the first piece starts with the
  // scales.
  __device__ __forceinline__ void request(int piece, int slot) {
    if (source_ == nullptr) return;
    const int steps_left = Cut::stage_steps(stage_) - piece * kPieceSteps;
    if (steps_left <= 0 || lane_ != 0) return;
    const int begin = piece == 0 ? 0 : Cut::kScaleBytes + Cut::bytes_of(piece * kPieceSteps);
    const int end =
        Cut::kScaleBytes + Cut::bytes_of(piece * kPieceSteps + min(steps_left, kPieceSteps));
    const uint32_t bytes = end - begin;
    Mbarrier* const full = &barriers_.full[slot][piece];
    mbarrier_expect_bytes(full, C::kTiles * bytes);
#pragma unroll
    for (int tile = 0; tile < C::kTiles; ++tile) {
      void* const to = ring_ + slot * kSlotBytes + tile * kStageBytes + begin;
      const unsigned char* const from = source_ + tile * Cut::kTileBytes + begin;
      if constexpr (kReadOnce) {
        bulk_copy_once_to_shared(to, from, bytes, full);
      } else {
        bulk_copy_to_shared(to, from, bytes, full);
      }
    }
  }
  __device__ __forceinline__ void request_from(int piece, int slot) {
#pragma unroll
    for (; piece < C::kPieces; ++piece) request(piece, slot);
  }
  // Move to the stage after the one at ``source_``.
  __device__ __forceinline__ void advance() {
    if (source_ == nullptr) return;
    source_ += Cut::bytes_of(Cut::stage_steps(stage_)) + Cut::kScaleBytes;
    if (++stage_ < end_stage()) return;
    next_ += stride_;
    begin_group();
  }

  __device__ __forceinline__ void wait(int piece) {
    const int bit = slot_ * C::kPieces + piece;
    mbarrier_wait(&barriers_.full[slot_][piece], parities_ >> bit & 1u);
    parities_ ^= 1u << bit;
  }

  // Process a stage of ``count`` steps. Each piece that has been read is replaced by one of the
  // stage at ``source_``.
  template <int count, class Step>
  __device__ __forceinline__ void consume(int first_step, Step&& step) {
    const unsigned char* const slot = ring_ + slot_ * kSlotBytes;
    uint4 upper_scales[C::kTiles], lower_scales[C::kTiles];
    uint32_t upper_pairs[C::kTiles][2], lower_pairs[C::kTiles][2];
#pragma unroll
    for (int i = 0; i < count; ++i) {
      if (i % kPieceSteps == 0) wait(i / kPieceSteps);
      if (i == 0 && !Cut::kBf16) {
#pragma unroll
        for (int tile = 0; tile < C::kTiles; ++tile) {
          const unsigned char* scales = slot + tile * kStageBytes + lane_ / 4 * 16;
          upper_scales[tile] = *reinterpret_cast<const uint4*>(scales);
          lower_scales[tile] = *reinterpret_cast<const uint4*>(scales + 128);
        }
      }
      StepOperands operands[C::kTiles];
#pragma unroll
      for (int tile = 0; tile < C::kTiles; ++tile) {
        if constexpr (Cut::kBf16) {
          const unsigned char* const at =
              slot + tile * kStageBytes + i * Cut::kUnitBytes + lane_ * 16;
          const uint4 a = *reinterpret_cast<const uint4*>(at);
          const uint4 b = *reinterpret_cast<const uint4*>(at + kHalfStepBytes);
          operands[tile] = {{a.x, b.x, a.y, b.y}, {a.z, b.z, a.w, b.w}};
          continue;
        }
        uint32_t& upper = upper_pairs[tile][i % 2];
        uint32_t& lower = lower_pairs[tile][i % 2];
        if (i % 4 < 2) {
          upper = alternate_scales(word_of(upper_scales[tile], i / 4), i % 2);
          lower = alternate_scales(word_of(lower_scales[tile], i / 4), i % 2);
        }
        const uint2 codes = *reinterpret_cast<const uint2*>(slot + tile * kStageBytes +
                                                            (1 + i) * kStepBytes + lane_ * 8);
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
      if (i % kPieceSteps == kPieceSteps - 1 || i == count - 1) {
        // Every lane has read the piece before it is filled again.
        __syncwarp();
        request(i / kPieceSteps, slot_);
      }
    }
    request_from(ceil_div(count, kPieceSteps), slot_);
    advance();
    if (++slot_ == C::kRingStages) slot_ = 0;
  }

  // A stage of ``count`` steps in units, of which registers hold one.
  template <class Step>
  __device__ __forceinline__ void consume_units(int first_step, int count, Step&& step) {
    const unsigned char* const slot = ring_ + slot_ * kSlotBytes + lane_ * 16;
    wait(0);
#pragma unroll 1
    for (int i = 0; i < count; i += Cut::kUnitSteps) {
      PlacedUnit<typename Cut::Units> held[C::kTiles];
#pragma unroll
      for (int tile = 0; tile < C::kTiles; ++tile) {
        const unsigned char* const from =
            slot + tile * kStageBytes + i / Cut::kUnitSteps * Cut::kUnitBytes;
#pragma unroll
        for (int piece = 0; piece < Cut::Units::kLoads; ++piece) {
          held[tile].pieces[piece] = *reinterpret_cast<const uint4*>(from + piece * kLoadBytes);
        }
        held[tile].scales = Cut::Units::scales_at(from);
      }
      step_of_unit<0>(held, first_step + i, step);
      // The last unit of an odd number of steps has one.
      if (i + 1 < count) step_of_unit<1>(held, first_step + i + 1, step);
    }
    // Every lane has read the stage before it is filled again.
    __syncwarp();
    request(0, slot_);
    advance();
    if (++slot_ == C::kRingStages) slot_ = 0;
  }
  template <int block, class Step>
  __device__ __forceinline__ void step_of_unit(
      const PlacedUnit<typename Cut::Units> (&held)[C::kTiles], int index, Step&& step) {
    StepOperands operands[C::kTiles];
#pragma unroll
    for (int tile = 0; tile < C::kTiles; ++tile) {
      Cut::Units::template decode<block>(held[tile], operands[tile].low, operands[tile].high);
    }
    step(index, operands);
  }

  static __device__ __forceinline__ uint32_t word_of(const uint4& words, int i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
  }

  unsigned char* ring_;
  Barriers& barriers_;
  TileOf tile_of_;
  int lane_;
  // The next stage to copy, or null.
  const unsigned char* source_ = nullptr;
  int next_ = 0, end_ = 0, stride_ = 0, stage_ = 0;
  int slot_ = 0;
  uint32_t parities_ = 0;
};
