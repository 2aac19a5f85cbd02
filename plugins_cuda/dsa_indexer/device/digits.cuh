// Scores by a digit that rises with them: score_slots counts digits, select_slots reads the counts.
#pragma once

#include "../../_device/ordered_key.cuh"

constexpr int kDigits = 2048;
// Sign, exponent and a bit of the mantissa make a digit. Where scores are expected, from 2^−8 to
// 2^8, it is six bits: of 131k scores some hundred have the digit of the last one that is taken.
constexpr int kCoarseBits = 22, kFineBits = 17, kFineDigits = 1024;
constexpr uint32_t kFineFrom = 0x80000000u | (127u - 8u) << 23;
constexpr uint32_t kFineSpan = static_cast<uint32_t>(kFineDigits) << kFineBits;
constexpr int kFirstFine = kFineFrom >> kCoarseBits;
// What the fine digits shift those above them by.
constexpr int kFineShift = kFineDigits - (kFineSpan >> kCoarseBits);
static_assert((1 << (32 - kCoarseBits)) + kFineShift <= kDigits, "every key has a digit");
// The digit of zero, which no other score has: see `counted_score`.
constexpr int kZeroDigit = 0x80000000u >> kCoarseBits;

__device__ __forceinline__ int digit_of(uint32_t key) {
  const uint32_t into = key - kFineFrom;
  if (into < kFineSpan) return kFirstFine + static_cast<int>(into >> kFineBits);
  const int coarse = static_cast<int>(key >> kCoarseBits);
  return coarse < kFirstFine ? coarse : coarse + kFineShift;
}

// The keys of a digit: 2^bits from `first` on.
struct DigitKeys {
  uint32_t first;
  int bits;
};

__device__ __forceinline__ DigitKeys keys_of(int digit) {
  if (digit >= kFirstFine && digit < kFirstFine + kFineDigits) {
    return {kFineFrom + (static_cast<uint32_t>(digit - kFirstFine) << kFineBits), kFineBits};
  }
  const int coarse = digit < kFirstFine ? digit : digit - kFineShift;
  return {static_cast<uint32_t>(coarse) << kCoarseBits, kCoarseBits};
}

// Scores that no normal number holds are zero, and tie with it.
__device__ __forceinline__ float counted_score(float score) {
  return score < 1.17549435e-38f && score > -1.17549435e-38f ? 0.0f : score;
}

// Scores from one row and view to the next in memory: rows begin where four can be read at once.
__device__ __forceinline__ int64_t score_stride(int capacity) {
  return round_up(capacity, 4);
}
