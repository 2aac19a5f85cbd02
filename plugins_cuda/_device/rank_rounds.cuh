// Rows of values in rounds of an exchange: what each rank has of a value goes to all others, and
// every rank has the sum over all.
//
// A thread owns pairs of neighbouring columns, the same on every rank, and kPairs of them at a
// time, so that their words travel together. A grid is at most 120 CTAs, all of them resident: a
// CTA of one rank that waited for one of another that cannot start would wait for ever. Many rows
// are rounds of kRows rows. Rows without a live sequence take part: a round has a word of every
// peer.
//
// A round moves 8·kWidth bytes a row to each peer; one of a single row takes as long as a store
// takes to be seen on the other GPU.
//
// C: kWidth, kRows (of a round), kThreads, kPairs.
#pragma once

#include "rank_exchange.cuh"

// ``op.own(pair)`` is what this rank sends of a pair, counted over all rows. ``op.ahead(pair,
// column)`` loads what is added on this GPU, where ``column`` is the pair within its row: it is
// here before the peers' words are. ``op.end(pair, ahead, sum)`` takes the sum. Behind the wait.
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
          if (pair < pairs) words[p][i] = peers.look(number, i, 2 * pair);
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
