// The state of a slot, row and head of absorbed attention in the workspaces.
//
// Config: VALUE. Columns are summed by two warpgroups, each of which has half of
// their panels of 64. A half's sums are fp16 times a power of two that sets their greatest between
// 2^14 and 2^15: rounding is 2^-11 of a sum, of small ones 2^-40 of the greatest (the weights' own
// is 2^-9 of each). The pair of floats of a half is that power, behind the sum of the weights (half
// 0) or the score that they are taken by (half 1), which stands at most 8 in exponents below their
// greatest. 16 bytes are the four pairs of columns that a thread of a wgmma's sums has of 32.
#pragma once

#include "../../_device/f16.cuh"
#include "config.cuh"

constexpr int kValuePanels = ceil_div(Config::kValue, 64), kOwnPanels = ceil_div(kValuePanels, 2);
constexpr int kStateUnits = 4 * ceil_div(Config::kValue, 32);  // of 16 bytes

// The first column of pair ``i`` of unit ``u``.
__device__ __forceinline__ constexpr int state_column(int u, int i) {
  return u / 4 * 32 + 8 * i + u % 4 * 2;
}

// The half that sums up a unit's columns.
__device__ __forceinline__ constexpr int state_half(int u) {
  return u / 8 >= kOwnPanels;
}

// The power of two of sums up to ``greatest``, and what they are multiplied by to be stored.
struct StateScale {
  float unit, inverse;

  __device__ __forceinline__ explicit StateScale(float greatest) {
    // Bits of an exponent; below 2^-95 sums keep fewer bits.
    constexpr uint32_t kOne = 1u << 23, kLeast = 32 * kOne, kStored = 14 * kOne;
    const uint32_t power = max(__float_as_uint(greatest) & 0x7F800000u, kLeast);
    unit = __fmul_rn(__uint_as_float(power), 1.0f / 16384);
    inverse = __uint_as_float(254 * kOne - power + kStored);
  }
};
