// Tokens as panels (prefill_panel.cuh) that all warps of a CTA multiply by: kColumns tokens by 64
// values of k each, in rising order, once or several times, through kStages places.
//
// Where every panel has a place, it stays there. Else thread 0 asks for the next panel once every
// warp has left its place; it looks kBehind panels behind, so that warps may drift apart by as
// much.
#pragma once

#include "prefill_panel.cuh"
#include "ptx.cuh"

template <int kColumns_, int kMostPanels, int kStages, int kWarps>
class PanelStream {
 public:
  static constexpr int kColumns = kColumns_;
  static constexpr int kPanelBytes = kColumns * kPanelRowBytes;
  static constexpr int kBytes = kStages * kPanelBytes;
  static constexpr bool kResident = kStages == kMostPanels;
  static_assert(kStages <= kMostPanels, "no place is left empty");

  struct Barriers {
    Mbarrier full[kStages], empty[kStages];
  };

  // ``stages``: kBytes from a multiple of 1024. ``panels``: of one pass, at most kMostPanels. A
  // barrier of the CTA stands between this and the first begin().
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

  // Asks for the first panels of ``tokens`` [panels][kColumns] rows, which other launches have
  // written, to be read ``passes`` times.
  __device__ __forceinline__ void start(const unsigned char* tokens, int passes) {
    tokens_ = tokens;
    left_ = kResident ? (passes > 0 ? panels_ : 0) : passes * panels_;
    if (threadIdx.x != 0) return;
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) request(i);
  }

  // Where a panel's rows begin that the caller itself writes, and its barrier, for one arrival.
  __device__ __forceinline__ unsigned char* place(int panel) const {
    return stages_ + panel * kPanelBytes;
  }
  __device__ __forceinline__ Mbarrier* barrier(int panel) const {
    return &barriers_.full[panel];
  }

  // The next panel, once it is there.
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
    // Thread 0 may come from its wait later than the lanes that multiply with it.
    __syncwarp();
    return stages_ + at_ * kPanelBytes;
  }

  // Behind the wait for the products that read it.
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
  static_assert(kResident || kBehind > 0, "a place is asked for again before it is needed");

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
  int left_ = 0, next_ = 0;  // thread 0's: panels to be asked for, and the next one
  int begun_ = 0, at_ = 0;
  uint32_t phase_ = 0;
};
