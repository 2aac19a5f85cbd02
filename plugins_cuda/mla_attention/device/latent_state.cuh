// The state of a split, row and head of absorbed attention in the workspaces.
//
// Config: VALUE. Two warpgroups sum the columns, each half of their panels of 64. The sums of a
// half are fp16 values times a power of two such that the largest is between 2^14 and 2^15. The
// rounding error is 2^-11 of a sum; for small sums it is 2^-40 of the largest (that of the weights
// is 2^-9 of each). The pair of floats of a half has, first, the sum of the weights (half 0) or
// their base score (half 1), at most 8 below the largest in exponents, and second, the power. A
// unit of 16 bytes has the four pairs of columns that a thread of wgmma has of 32.
#pragma once

#include "../../_device/f16.cuh"
#include "config.cuh"

constexpr int kValuePanels = ceil_div(Config::kValue, 64), kOwnPanels = ceil_div(kValuePanels, 2);
constexpr int kStateUnits = 4 * ceil_div(Config::kValue, 32);  // of 16 bytes

// The first column of pair ``i`` of unit ``u``.
__device__ __forceinline__ constexpr int state_column(int u, int i) {
  return u / 4 * 32 + 8 * i + u % 4 * 2;
}

// The half that sums the columns of a unit.
__device__ __forceinline__ constexpr int state_half(int u) {
  return u / 8 >= kOwnPanels;
}

// The power of two for sums up to ``greatest``, and the factor with which they are stored.
struct StateScale {
  float unit, inverse;

  __device__ __forceinline__ explicit StateScale(float greatest) {
    // Exponent bits; below 2^-95 sums have fewer significant bits.
    constexpr uint32_t kOne = 1u << 23, kLeast = 32 * kOne, kStored = 14 * kOne;
    const uint32_t power = max(__float_as_uint(greatest) & 0x7F800000u, kLeast);
    unit = __fmul_rn(__uint_as_float(power), 1.0f / 16384);
    inverse = __uint_as_float(254 * kOne - power + kStored);
  }
};
