// The tiles of one CTA through slots of shared memory that all its warps share: where a CTA has few
// tiles, private rings would keep part of the memory idle.
#pragma once

#include "mxfp4.cuh"
#include "ptx.cuh"
#include "types.cuh"

// Warp w takes the tiles w, w + warps, … below ``units``; ``TileOf`` maps such a number to the
// tile's address. Stages are numbered in the order in which warps that keep step reach them: of the
// first ``warps`` tiles all first stages, then all second ones, …. Stage n passes through slot
// n % slots, and whoever is done with stage n fills its slot with stage n + slots. A stage has its
// own barrier, used once: warps need not keep step.
//
// Shared memory: ``slots`` × 4096 bytes aligned to 128, and most_units · kStages barriers. The
// whole CTA calls init(), a __syncthreads() follows, then start().
template <int steps, int slots, int warps, int most_units, class TileOf>
class TilePool {
 public:
  using Cut = TileCut<steps>;
  static constexpr int kBarriers = most_units * Cut::kStages;

  __device__ __forceinline__ TilePool(unsigned char* memory, Mbarrier* full, TileOf tile_of)
      : memory_(memory), full_(full), tile_of_(tile_of) {}

  __device__ __forceinline__ void init() {
    for (int i = threadIdx.x; i < kBarriers; i += 32 * warps) mbarrier_init(full_ + i, 1);
    mbarrier_init_fence();
  }

  __device__ __forceinline__ void start(int units) {
    units_ = units;
#pragma unroll 1
    for (int n = static_cast<int>(threadIdx.x) / 32; n < slots; n += warps) request(n);
  }

  // ``step`` as in decode_stage, for every step of tile ``unit``, one of this warp's, in order.
  template <class Step>
  __device__ __forceinline__ void tile(int unit, Step&& step) {
    const int round = unit / warps, stride = round_units(round);
    int n = round * warps * Cut::kStages + unit % warps;
#pragma unroll 1
    for (int stage = 0; stage < Cut::kFullStages; ++stage, n += stride) {
      consume<kStageSteps>(n, stage * kStageSteps, step);
    }
    if constexpr (Cut::kTailSteps > 0) {
      consume<Cut::kTailSteps>(n, Cut::kFullStages * kStageSteps, step);
    }
  }

 private:
  __device__ __forceinline__ int round_units(int round) const {
    const int left = units_ - round * warps;
    return left < warps ? left : warps;
  }

  // Copies stage n, if there is one, into its slot, which is free.
  __device__ __forceinline__ void request(int n) {
    if (n >= units_ * Cut::kStages) return;
    const int round = n / (warps * Cut::kStages), in_round = n % (warps * Cut::kStages);
    const int stride = round_units(round);
    const int stage = stride == warps ? in_round / warps : in_round / stride;
    if (threadIdx.x % 32 == 0) {
      const uint32_t bytes = Cut::stage_bytes(stage);
      const unsigned char* tile = tile_of_(round * warps + in_round - stage * stride);
      mbarrier_expect_bytes(full_ + n, bytes);
      bulk_copy_to_shared(memory_ + n % slots * kStageBytes, tile + stage * kStageBytes, bytes,
                          full_ + n);
    }
  }

  template <int count, class Step>
  __device__ __forceinline__ void consume(int n, int first_step, Step&& step) {
    mbarrier_wait(full_ + n, 0);
    decode_stage<count>(memory_ + n % slots * kStageBytes, first_step, step);
    // Every lane has read the slot before it is filled again.
    __syncwarp();
    request(n + slots);
  }

  unsigned char* memory_;
  Mbarrier* full_;
  TileOf tile_of_;
  int units_ = 0;
};
