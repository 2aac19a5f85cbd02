// The epilogue of the head: from a product to a logit.
#pragma once

#include "infinity.cuh"

// Whether the last tile has padding rows, because the vocabulary size kVocab is no multiple of 16.
template <class C>
constexpr bool kPads = C::kVocab % 16 != 0;

// Return minus infinity for padding rows.
template <class C>
__device__ __forceinline__ float logit_of(int token, float logit) {
  return kPads<C> && token >= C::kVocab ? minus_infinity() : logit;
}

// Divide by kLogitDivisor, then apply c · tanh(logit / c) with c = kLogitCap if that is not 0.
// Neither changes the order of logits.
template <class C>
__device__ __forceinline__ float final_logit(float sum) {
  if (C::kLogitDivisor != 1) sum /= C::kLogitDivisor;
  if (C::kLogitCap != 0) {
    // tanh by exp: its error relative to 1 becomes an error relative to the cap.
    sum = C::kLogitCap * (1.0f - 2.0f / (1.0f + expf(2.0f / C::kLogitCap * sum)));
  }
  return sum;
}
