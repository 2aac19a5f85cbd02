// A digit of scores that is monotonic in the score: score_slots counts digits, select_slots reads
// the counts.
#pragma once

#include "../../_device/ordered_key.cuh"

constexpr int kDigits = 2048;
// A digit has the sign, the exponent and one bit of the mantissa. From 2^−8 to 2^8, the usual range
// of scores, it has six mantissa bits: of 131k scores, some hundred have the digit of the last
// selected one.
constexpr int kCoarseBits = 22, kFineBits = 17, kFineDigits = 1024;
constexpr uint32_t kFineFrom = 0x80000000u | (127u - 8u) << 23;
constexpr uint32_t kFineSpan = static_cast<uint32_t>(kFineDigits) << kFineBits;
constexpr int kFirstFine = kFineFrom >> kCoarseBits;
// The offset of the digits above the fine ones.
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

// Scores below the normal range become zero, and are ties of zero.
__device__ __forceinline__ float counted_score(float score) {
  return score < 1.17549435e-38f && score > -1.17549435e-38f ? 0.0f : score;
}

// The stride of scores between rows and views; rows are aligned for vector loads of four.
__device__ __forceinline__ int64_t score_stride(int capacity) {
  return round_up(capacity, 4);
}
