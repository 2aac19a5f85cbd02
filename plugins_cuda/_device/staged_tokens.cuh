// Tokens that do not fit shared memory pass through it in stages that all warps of a CTA share.
//
// A stage is the kDepthBlocks blocks of columns that a warp multiplies between two looks at it.
// Thread 0 asks for the next one once every warp has left its place; it looks two stages behind, so
// that warps may drift apart by as much.
#pragma once

#include "small_linear.cuh"

template <class Shape, int kStages>
class StagedTokens {
 public:
  static constexpr int kBlockBytes = Shape::kTokenTiles * kFragmentBytes;
  static constexpr int kStageBytes = Shape::kDepthBlocks * kBlockBytes;
  static constexpr int kBytes = kStages * kStageBytes;

  struct Barriers {
    Mbarrier full[kStages], empty[kStages];
  };

  // ``tokens``: fragments of all of K, read ``passes`` times. ``stages``: kBytes.
  __device__ __forceinline__ StagedTokens(unsigned char* stages, Barriers& barriers,
                                          const unsigned char* tokens, int passes)
      : stages_(stages), barriers_(barriers), tokens_(tokens), left_(passes * kStagesOfPass) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        mbarrier_init(&barriers_.full[i], 1);
        mbarrier_init(&barriers_.empty[i], Shape::kWarps);
      }
      mbarrier_init_fence();
    }
    __syncthreads();
  }

  // Asks for the first stages, which other launches have written.
  __device__ __forceinline__ void start() {
    if (threadIdx.x != 0) return;
    for (int i = 0; i < kStages; ++i) request(i);
  }

  __device__ __forceinline__ void begin() {
    if (threadIdx.x == 0 && begun_ >= kBehind) {
      const int slot = at_ < kBehind ? at_ - kBehind + kStages : at_ - kBehind;
      if (left_ > 0) mbarrier_wait(&barriers_.empty[slot], at_ < kBehind ? phase_ ^ 1 : phase_);
      request(slot);
    }
    ++begun_;
    mbarrier_wait(&barriers_.full[at_], phase_);
    // Thread 0 may come from its wait later than the lanes that multiply with it.
    __syncwarp();
    place_ = stages_ + at_ * kStageBytes + threadIdx.x % 32 * 16;
  }
  __device__ __forceinline__ void end() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&barriers_.empty[at_]);
    if (++at_ == kStages) {
      at_ = 0;
      phase_ ^= 1;
    }
  }
  __device__ __forceinline__ void fetch(int, int) {}
  __device__ __forceinline__ uint4 get(int slot, int, int token_tile) const {
    return *reinterpret_cast<const uint4*>(place_ + slot * kBlockBytes +
                                           token_tile * kFragmentBytes);
  }

 private:
  static constexpr int kStagesOfPass = Shape::kSteps / Shape::kDepth, kBehind = 2;
  static_assert(kStages > kBehind, "a place is asked for again before it is needed");

  __device__ __forceinline__ void request(int slot) {
    if (left_ == 0) return;
    --left_;
    const int bytes = min(Shape::kDepthBlocks, Shape::kBlocks - next_block_) * kBlockBytes;
    mbarrier_expect_bytes(&barriers_.full[slot], bytes);
    bulk_copy_to_shared(stages_ + slot * kStageBytes, tokens_ + next_block_ * kBlockBytes, bytes,
                        &barriers_.full[slot]);
    next_block_ += Shape::kDepthBlocks;
    if (next_block_ >= Shape::kBlocks) next_block_ = 0;
  }

  unsigned char* stages_;
  Barriers& barriers_;
  const unsigned char* tokens_;
  const unsigned char* place_ = nullptr;
  int left_, next_block_ = 0;  // thread 0's: stages to be asked for, and the next one's first block
  int begun_ = 0, at_ = 0;
  uint32_t phase_ = 0;
};
