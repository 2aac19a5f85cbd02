// Quantized weights that are streamed through shared memory, in kernels whose tokens are in shared
// memory too.
//
// A warp has kRing stages of a unit of kTiles tiles, and requests the next step when one is free.
// Registers hold one step only: steps in flight need none. So decoders that need many registers
// have no branches between steps, and the loop around a step is small. The order of additions and
// the interface are those of WeightStream (small_linear.cuh).
//
// Measured on an H200 with one row of Llama 8B, compared with WeightStream:
//
// | product           | format    | time                |
// |-------------------|-----------|---------------------|
// | gate and up       | Q6_K      | 42 instead of 56 µs |
// | gate and up       | Q5_K      | 44 instead of 55 µs |
// | gate and up       | bytes     | 5 % less            |
// | gate and up       | four bits | the same            |
// | query, key, value | all       | 9 to 16 % less      |
#pragma once

#include "small_linear.cuh"

// A unit in shared memory with this lane's pieces: HeldUnit without shuffles between lanes.
template <class Units>
struct PlacedUnit {
  uint4 pieces[Units::kLoads];
  const unsigned char* scales;

  template <int number>
  __device__ __forceinline__ uint32_t word(int from) const {
    const int place = Units::scale_place(number, threadIdx.x % 32 / 4, from);
    return *reinterpret_cast<const uint32_t*>(scales + place);
  }
  template <int number>
  __device__ __forceinline__ uint32_t own() const {
    return word<number>(threadIdx.x % 4);
  }
};

// The same number, which ptxas keeps in a register instead of computing it again for every copy.
__device__ __forceinline__ int kept(int value) {
#ifndef SPECBUILD_EMULATE
  asm("" : "+r"(value));
#endif
  return value;
}

template <class Shape, class Chunks>
class WeightRing {
 public:
  using Sums = float[Shape::kTiles][Shape::kTokenTiles][4];
  // The steps that are requested before the previous launch has finished. The others follow the
  // tokens, so that fewer weights delay these.
  static constexpr int kEarly = ceil_div(Shape::kRing, 2), kLate = Shape::kRing - kEarly;

  __device__ __forceinline__ WeightRing(const typename Shape::Units::Stored* weight,
                                        const Chunks& chunks, unsigned char* ring, int slice)
      : chunks_(chunks) {
    const int first = slice * Shape::kSliceBlocks;
    weight_ = reinterpret_cast<const unsigned char*>(weight) +
              first / Shape::kUnitBlocks * Units::kBytes + lane() * 16;
    blocks_ = min(Shape::kSliceBlocks, Shape::kBlocks - first);
    skipped_ = Shape::kWholeUnits ? 0 : first % Shape::kUnitBlocks;
    units_ = blocks_ > 0 ? ceil_div(skipped() + blocks_, Shape::kUnitBlocks) : 0;
    ring_ = ring + kept(threadIdx.x / 32 * kRingBytes + lane() * 16);
    request_chunk(0);
  }

  __device__ __forceinline__ void start() {
    start_stages<0, kEarly>();
  }
  __device__ __forceinline__ void start_ring() {
    start_stages<kEarly, Shape::kRing>();
  }

  // Pass the sums of every chunk over this warp's slice to finish(chunk, sums).
  template <class Input, class Finish>
  __device__ __forceinline__ void run(const Input& tokens, Finish finish) {
    const int count = chunks_.count();
    int place = 0;  // in bytes
#pragma unroll 1
    for (int chunk = 0; chunk < count; ++chunk) {
      Sums sums = {};
      if constexpr (kRounds) {
#pragma unroll 1
        for (int unit = 0; unit < Shape::kSliceUnits; unit += Shape::kRing) {
          if (unit + Shape::kRing == Shape::kSliceUnits) {
            request_chunk(chunk + 1);
          } else {
            from_ += Shape::kRing * Units::kBytes;
          }
#pragma unroll
          for (int i = 0; i < Shape::kRing; ++i) {
            step(sums, tokens, ring_ + i * kPlaceBytes, unit + i,
                 [&](unsigned char* stage) { copy(stage, from_ + i * Units::kBytes); });
          }
        }
      } else {
#pragma unroll 1
        for (int unit = 0; unit < units_; ++unit) {
          step(sums, tokens, ring_ + place, unit, [&](unsigned char* stage) { request(stage); });
          place = place + kPlaceBytes == kRingBytes ? 0 : place + kPlaceBytes;
        }
      }
      finish(chunk, sums);
    }
  }

 private:
  using Units = typename Shape::Units;
  using Held = PlacedUnit<Units>;
  static constexpr int kPlaceBytes = Shape::kTiles * Units::kBytes;
  static constexpr int kRingBytes = Shape::kRing * kPlaceBytes;
  // Whether all slices are a whole number of rounds through the stages. The compiler then knows the
  // stage and the address of every step of a round. Otherwise each step computes them.
  static constexpr bool kRounds = Shape::kEven;
  static constexpr int kScalePieces = (Units::kBytes - Units::kLoads * kLoadBytes) / 16;
  static_assert(Units::kBytes % 16 == 0 && kScalePieces <= 32, "a lane copies at most one piece");

  static __device__ __forceinline__ int lane() {
    return threadIdx.x % 32;
  }
  __device__ __forceinline__ int skipped() const {
    return Shape::kWholeUnits ? 0 : skipped_;
  }

  // Set the next request to the first unit of a chunk, or to nothing if there is no such chunk.
  __device__ __forceinline__ void request_chunk(int chunk) {
    next_chunk_ = chunk;
    units_left_ = units_;
    requested_ = 0;
    if (chunk >= chunks_.count() || units_ == 0) return;
    const int tile = chunks_.first_tile(chunk);
    from_ = weight_ + static_cast<int64_t>(tile) * (Shape::kUnits * Units::kBytes);
#pragma unroll
    for (int t = 0; t < Shape::kTiles; ++t) {
      const int pair = (tile + t) * kPairsPerTile;
      const bool touched = pair < chunks_.range.last && pair + kPairsPerTile > chunks_.range.first;
      if (chunks_.holds(pair + lane() / 4)) requested_ |= 1u << t;
      if (touched && lane() < kScalePieces) requested_ |= 1u << (Shape::kTiles + t);
    }
  }

  template <int first, int last>
  __device__ __forceinline__ void start_stages() {
#pragma unroll
    for (int place = first; place < last; ++place) {
      unsigned char* const stage = ring_ + place * kPlaceBytes;
      if constexpr (kRounds) {
        copy(stage, from_ + place * Units::kBytes);
      } else {
        request(stage);
      }
    }
  }

  // Multiply the step in a stage, then start to copy another one to it.
  template <class Input, class Refill>
  __device__ __forceinline__ void step(Sums& sums, const Input& tokens, unsigned char* stage,
                                       int unit, const Refill& refill) {
    cp_async_wait<Shape::kRing - 1>();
    __syncwarp();  // other lanes copy the scales
    multiply(sums, tokens, stage, unit);
    __syncwarp();
    refill(stage);
  }

  // Start to copy a step to this lane's bytes of a stage: one group, possibly empty. ``step`` is
  // the unit of the first tile.
  __device__ __forceinline__ void copy(unsigned char* to, const unsigned char* step) {
    constexpr int kScales = Units::kLoads * kLoadBytes;
#pragma unroll
    for (int t = 0; t < Shape::kTiles; ++t) {
      const unsigned char* const from = step + t * (Shape::kUnits * Units::kBytes);
      unsigned char* const tile = to + t * Units::kBytes;
      if (requested_ >> t & 1) {
#pragma unroll
        for (int at = 0; at < kScales; at += kLoadBytes) cp_async_16(tile + at, from + at);
      }
      if (requested_ >> (Shape::kTiles + t) & 1) cp_async_16(tile + kScales, from + kScales);
    }
    cp_async_commit();
  }

  // Copy the next step, and advance.
  __device__ __forceinline__ void request(unsigned char* to) {
    copy(to, from_);
    from_ += Units::kBytes;
    if (--units_left_ <= 0) request_chunk(next_chunk_ + 1);
  }

  template <class Input>
  __device__ __forceinline__ void multiply(Sums& sums, const Input& tokens,
                                           const unsigned char* place, int unit) {
    Held held[Shape::kTiles];
#pragma unroll
    for (int t = 0; t < Shape::kTiles; ++t) {
      const unsigned char* const from = place + t * Units::kBytes;
#pragma unroll
      for (int piece = 0; piece < Units::kLoads; ++piece) {
        held[t].pieces[piece] = *reinterpret_cast<const uint4*>(from + piece * kLoadBytes);
      }
      held[t].scales = Units::scales_at(from);
    }
    const int block = unit * Shape::kUnitBlocks - skipped();
    if (Shape::kWholeUnits || block >= 0) multiply_block<0>(sums, tokens, held, block);
    if constexpr (Shape::kUnitBlocks == 2) {
      constexpr bool kWhole = Shape::kBlocks % 2 == 0 && Shape::kWholeUnits;
      if (kWhole || block + 1 < blocks_) multiply_block<1>(sums, tokens, held, block + 1);
    }
  }

  template <int half, class Input>
  __device__ __forceinline__ void multiply_block(Sums& sums, const Input& tokens,
                                                 const Held (&held)[Shape::kTiles], int block) {
    uint32_t first[Shape::kTiles][4], second[Shape::kTiles][4];
#pragma unroll
    for (int t = 0; t < Shape::kTiles; ++t) {
      Units::template decode<half>(held[t], first[t], second[t]);
    }
#pragma unroll
    for (int n = 0; n < Shape::kTokenTiles; ++n) {
      const uint4 b = tokens.get(0, block, n);
      const uint32_t b_first[2] = {b.x, b.y}, b_second[2] = {b.z, b.w};
#pragma unroll
      for (int t = 0; t < Shape::kTiles; ++t) mma_bf16(sums[t][n], first[t], b_first);
#pragma unroll
      for (int t = 0; t < Shape::kTiles; ++t) mma_bf16(sums[t][n], second[t], b_second);
    }
  }

  Chunks chunks_;
  const unsigned char* weight_;  // of this lane, in the first unit of the slice of tile 0
  unsigned char* ring_;          // of this lane, in the first stage
  int blocks_, skipped_, units_;
  // The next request: a unit of a chunk (the first one of a round), this lane's bytes of it, and a
  // mask of the pieces that the lane copies: values of tiles in the lowest bits, scales above.
  const unsigned char* from_ = nullptr;
  int next_chunk_, units_left_;
  unsigned requested_;
};
