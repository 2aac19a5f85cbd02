// The selection of a row's experts from the router's logits.
//
// A choice declares kLogits (of a row), Row (a lane's part of one), Best (the selected experts),
// and
//
//   read(logits)                     one warp: load a row that other CTAs wrote
//   choose(rows, best, weighed)      one warp: select for several rows; the keys of selected
//                                    experts are then taken()
//   store(best, logits, chosen, weights)  one lane: write a row's experts by ascending id (unless
//                                    null)
#pragma once

#include "rounded_choice.cuh"
#include "scored_choice.cuh"

template <class C, bool scored>
struct ChoiceFor {
  using Of = RoundedChoice<C>;
};
template <class C>
struct ChoiceFor<C, true> {
  using Of = ScoredChoice<C>;
};
template <class C>
using ChoiceOf = typename ChoiceFor<C, C::kScored != 0>::Of;

// One warp writes the experts of a row by ascending id to ``chosen`` [top_k], and their weights.
template <class Choice>
__device__ __forceinline__ void choose_experts(const float* logits, int* chosen, float* weights) {
  typename Choice::Row row[1] = {Choice::read(logits)};
  typename Choice::Best best[1];
  Choice::choose(row, best, true);
  if (threadIdx.x % 32 == 0) Choice::store(best[0], logits, chosen, weights);
}
