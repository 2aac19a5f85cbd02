// What a product with the head comes to as a logit.
#pragma once

#include "infinity.cuh"

// Whether rows of the last tile stand for no token: the vocabulary, kVocab, ends within it.
template <class C>
constexpr bool kPads = C::kVocab % 16 != 0;

// Of what stands for no token it is minus infinity.
template <class C>
__device__ __forceinline__ float logit_of(int token, float logit) {
  return kPads<C> && token >= C::kVocab ? minus_infinity() : logit;
}

// Over kLogitDivisor, then c · tanh(logit / c) where kLogitCap is c and not 0. Neither changes the
// order of logits.
template <class C>
__device__ __forceinline__ float final_logit(float sum) {
  if (C::kLogitDivisor != 1) sum /= C::kLogitDivisor;
  if (C::kLogitCap != 0) {
    // tanh, whose error beside 1 is that of a logit of the cap's size.
    sum = C::kLogitCap * (1.0f - 2.0f / (1.0f + expf(2.0f / C::kLogitCap * sum)));
  }
  return sum;
}
