// Scores by the highest digit of their keys: score_slots counts them, select_slots reads them.
#pragma once

#include "../_device/ordered_key.cuh"

// Sign, exponent and two bits of the mantissa.
constexpr int kDigits = 2048, kDigitShift = 21;
// The digit of zero, which no other score has: see `counted_score`.
constexpr int kZeroDigit = kDigits / 2;

__device__ __forceinline__ int first_digit(float score) {
  return static_cast<int>(ordered_key(score) >> kDigitShift);
}

// Scores that no normal number holds are zero, and tie with it.
__device__ __forceinline__ float counted_score(float score) {
  return score < 1.17549435e-38f && score > -1.17549435e-38f ? 0.0f : score;
}
