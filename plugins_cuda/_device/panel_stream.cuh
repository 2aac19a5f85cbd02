// Tokens as panels (prefill_panel.cuh) that all warps of a CTA multiply by: kColumns tokens × 64
// values of K. Panels pass through kStages stages in rising order, once or several times.
//
// If every panel has a stage, it stays there. Otherwise thread 0 requests the next panel when every
// warp has released a stage. It checks kBehind panels later, so that warps may drift apart by as
// many.
#pragma once

#include "prefill_panel.cuh"
#include "ptx.cuh"

template <int kColumns_, int kMaxPanels, int kStages, int kWarps>
class PanelStream {
 public:
  static constexpr int kColumns = kColumns_;
  static constexpr int kPanelBytes = kColumns * kPanelRowBytes;
  static constexpr int kBytes = kStages * kPanelBytes;
  static constexpr bool kResident = kStages == kMaxPanels;
  static_assert(kStages <= kMaxPanels, "no stage remains empty");

  struct Barriers {
    Mbarrier full[kStages], empty[kStages];
  };

  // ``stages``: kBytes, aligned to 1024. ``panels``: of one pass, at most kMaxPanels. A barrier of
  // the CTA must follow before the first begin().
  __device__ __forceinline__ PanelStream(unsigned char* stages, Barriers& barriers, int panels)
      : stages_(stages), barriers_(barriers), panels_(panels) {
    if (threadIdx.x != 0) return;
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&barriers_.full[i], 1);
      mbarrier_init(&barriers_.empty[i], kWarps);
    }
    mbarrier_init_fence();
  }

  // Request the first panels of ``tokens`` [panels][kColumns] rows, which previous launches have
  // written. They are read ``passes`` times.
  __device__ __forceinline__ void start(const unsigned char* tokens, int passes) {
    tokens_ = tokens;
    left_ = kResident ? (passes > 0 ? panels_ : 0) : passes * panels_;
    if (threadIdx.x != 0) return;
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) request(i);
  }

  // The address of a panel whose rows the caller writes itself, and its barrier, which expects one
  // arrival.
  __device__ __forceinline__ unsigned char* place(int panel) const {
    return stages_ + panel * kPanelBytes;
  }
  __device__ __forceinline__ Mbarrier* barrier(int panel) const {
    return &barriers_.full[panel];
  }

  // Wait for the next panel and return its address.
  __device__ __forceinline__ const unsigned char* begin() {
    if (!kResident) {
      if (threadIdx.x == 0 && begun_ >= kBehind) {
        const int slot = at_ < kBehind ? at_ - kBehind + kStages : at_ - kBehind;
        if (left_ > 0) mbarrier_wait(&barriers_.empty[slot], at_ < kBehind ? phase_ ^ 1 : phase_);
        request(slot);
      }
      ++begun_;
    }
    mbarrier_wait(&barriers_.full[at_], phase_);
    // Thread 0 may leave its wait later than the other lanes of its warp.
    __syncwarp();
    return stages_ + at_ * kPanelBytes;
  }

  // Call it after the products that read the panel have finished.
  __device__ __forceinline__ void end() {
    ++at_;
    if (kResident) {
      if (at_ == panels_) at_ = 0;
      return;
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&barriers_.empty[at_ - 1]);
    if (at_ == kStages) {
      at_ = 0;
      phase_ ^= 1;
    }
  }

 private:
  static constexpr int kBehind = kStages / 2;
  static_assert(kResident || kBehind > 0, "a stage is refilled before it is required");

  __device__ __forceinline__ void request(int slot) {
    if (left_ == 0) return;
    --left_;
    mbarrier_expect_bytes(&barriers_.full[slot], kPanelBytes);
    bulk_copy_to_shared(stages_ + slot * kPanelBytes, tokens_ + next_ * kPanelBytes, kPanelBytes,
                        &barriers_.full[slot]);
    if (++next_ == panels_) next_ = 0;
  }

  unsigned char* stages_;
  Barriers& barriers_;
  const unsigned char* tokens_ = nullptr;
  int panels_;
  int left_ = 0, next_ = 0;  // of thread 0: panels that are not requested yet, and the next one
  int begun_ = 0, at_ = 0;
  uint32_t phase_ = 0;
};
