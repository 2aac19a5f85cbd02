// An all-reduce of rows, in rounds: each rank sends its values to all others, and every rank adds
// the values of all ranks.
//
// A thread processes pairs of adjacent columns, the same on every rank, kPairs at a time, so that
// their words are in flight together. A grid has at most 120 CTAs, which are all resident.
// Otherwise a CTA could wait forever for a CTA of another rank that cannot start. A round has kRows
// rows at most. Rows without a live sequence take part, because a round has a word of every peer.
//
// A round sends 8·kWidth bytes per row to each peer. A round of one row takes as long as a store
// needs to become visible on the other GPU.
//
// C: kWidth, kRows (of a round), kThreads, kPairs.
#pragma once

#include "rank_exchange.cuh"

// Call it after griddepcontrol.wait. ``op.own(pair)`` returns the values that this rank sends;
// pairs are numbered over all rows. ``op.ahead(pair, column)`` loads the addend of this GPU, before
// the words of the peers arrive; ``column`` is the index of the pair in its row. ``op.end(pair,
// ahead, sum)`` receives the sum.
template <class C, class Peers, class Op>
__device__ __forceinline__ void exchange_rows(const Peers& peers, int rows, const Op& op) {
  constexpr int kRowPairs = C::kWidth / 2, kPairs = C::kPairs, kPeers = Peers::kPeers;
  const int stride = gridDim.x * C::kThreads;
  const int own_first = blockIdx.x * C::kThreads + threadIdx.x;
  for (int round = 0, row = 0; row < rows; ++round, row += C::kRows) {
    const int pairs = min(rows - row, C::kRows) * kRowPairs;
    const int64_t base = static_cast<int64_t>(row) * kRowPairs;
    const uint32_t number = peers.number(round);
    for (int first = own_first; first < pairs; first += kPairs * stride) {
      float2 own[kPairs];
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        const int pair = first + p * stride;
        if (pair < pairs) own[p] = op.own(base + pair);
      }
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        const int pair = first + p * stride;
        if (pair < pairs) peers.push(number, 2 * pair, own[p]);
      }
      typename Op::Ahead ahead[kPairs] = {};
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        const int pair = first + p * stride;
        if (pair < pairs) ahead[p] = op.ahead(base + pair, pair % kRowPairs);
      }
      WordPair words[kPairs][kPeers];
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        const int pair = first + p * stride;
#pragma unroll
        for (int i = 0; i < kPeers; ++i) {
          if (pair < pairs) words[p][i] = peers.load(number, i, 2 * pair);
        }
      }
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        const int pair = first + p * stride;
        if (pair >= pairs) continue;
        float2 theirs[kPeers];
#pragma unroll
        for (int i = 0; i < kPeers; ++i) {
          theirs[i] = peers.wait(words[p][i], number, i, 2 * pair);
        }
        op.end(base + pair, ahead[p], peers.in_order(own[p], theirs));
      }
    }
  }
}
