// The assignment of rows of a launch and their heads to the 16 rows of an mma.
#pragma once

#include "../../_device/types.cuh"

constexpr int kHalves = 2, kPlaces = 8;  // of an mma, and of a half

// Place g of either half belongs to lanes 4·g … 4·g + 3. A half holds the `group` query heads of
// one row of the launch. It holds those of two rows if there are up to 4 heads and a warp has
// several rows.
template <int group, int warp_rows>
struct MmaRows {
  static constexpr int kHeads = group <= 4 && warp_rows > 1 ? 4 : kPlaces;  // `group` are used
  static constexpr int kOfHalf = kPlaces / kHeads, kAll = kHalves * kOfHalf;
  static_assert(group <= kPlaces, "half an mma holds a row of a KV head's heads");

  // This lane's head, and its row; halves are counted through the warp's mmas.
  __device__ __forceinline__ static int head() {
    const int place = threadIdx.x % 32 / 4;
    return kOfHalf == 1 ? place : place % kHeads;
  }
  __device__ __forceinline__ static int row(int half) {
    const int place = threadIdx.x % 32 / 4;
    return kOfHalf == 1 ? half : half * kOfHalf + place / kHeads;
  }
};
