// A round of an exchange: every rank stores its values into the inboxes of all others, and waits
// for theirs in its own.
//
// A word is {fp32 bits, number of the round}. Rounds count up from 1 and alternate between two
// slots. Two are enough: who stores round n has seen a word of round n − 1 of every peer, and a
// peer stored that behind its own polls of round n − 2. Both hold for each word by itself where one
// thread owns it on every rank, or where another launch, behind this one, polls.
#pragma once

#include "ptx.cuh"
#include "ptx_peer.cuh"
#include "ptx_system.cuh"

// The longest wait between two looks at the clock.
constexpr int kTriesPerLook = 1024;

// ``kWords`` words of each sender of each slot.
template <int kRanks, int kWords>
struct RankExchange {
  static_assert(kRanks >= 2 && kRanks <= 8 && kWords % 2 == 0);
  static constexpr int kPeers = kRanks - 1;

  uint64_t* inbox;             // own: [2 slots, kPeers senders by their distance − 1, kWords]
  uint64_t* inbox_on[kPeers];  // of the rank that is i + 1 further, modulo all
  int* fault;                  // [8], in the host's memory
  int rank, exchange;
  uint32_t epoch, limit_ms;

  // ``state`` [2]: rounds of the programs before this one, and the limit. Behind the wait.
  __device__ RankExchange(uint64_t* inbox, uint64_t* on_1, uint64_t* on_2, uint64_t* on_3,
                          uint64_t* on_4, uint64_t* on_5, uint64_t* on_6, uint64_t* on_7,
                          const int* state, int* fault, int rank, int exchange)
      : inbox(inbox), fault(fault), rank(rank), exchange(exchange) {
    uint64_t* const all[7] = {on_1, on_2, on_3, on_4, on_5, on_6, on_7};
#pragma unroll
    for (int i = 0; i < kPeers; ++i) inbox_on[i] = all[i];
    epoch = static_cast<uint32_t>(load_l2_int(state));
    limit_ms = static_cast<uint32_t>(load_l2_int(state + 1));
  }

  // Of a program's i-th round.
  __device__ __forceinline__ uint32_t number(int round) const {
    return epoch + 1u + static_cast<uint32_t>(exchange + round);
  }

  // Stores two neighbouring values, of an even place, to all peers.
  __device__ __forceinline__ void push(uint32_t number, int place, float2 values) const {
#pragma unroll
    for (int i = 0; i < kPeers; ++i) {
      // Seen from the rank that is i + 1 further, this one is kRanks − 1 − i further.
      store_words(inbox_on[i] + at(number, kPeers - 1 - i, place), word(values.x, number),
                  word(values.y, number));
    }
  }

  // What the rank that is i + 1 further has stored, perhaps long before this round.
  __device__ __forceinline__ WordPair look(uint32_t number, int i, int place) const {
    return load_words(inbox + at(number, i, place));
  }

  // Looks again until both words are of this round.
  __device__ __forceinline__ float2 wait(WordPair words, uint32_t number, int i, int place) const {
    uint64_t begun = 0;
    for (int tries = 1; !is_of(words, number); ++tries) {
      if (tries % kTriesPerLook == 0) begun = look_at_clock(begun, number, i);
      words = look(number, i, place);
    }
    return make_float2(__uint_as_float(static_cast<uint32_t>(words.first)),
                       __uint_as_float(static_cast<uint32_t>(words.second)));
  }

  // The sum over all ranks in their order, which is the same on each: own, and the peers' by
  // distance.
  __device__ __forceinline__ float2 in_order(float2 own, const float2 (&peers)[kPeers]) const {
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      float2 values = own;
#pragma unroll
      for (int i = 0; i < kPeers; ++i) {
        if ((rank + i + 1) % kRanks == r) values = peers[i];
      }
      sum = r == 0 ? values : make_float2(sum.x + values.x, sum.y + values.y);
    }
    return sum;
  }

 private:
  static __device__ __forceinline__ int64_t at(uint32_t number, int sender, int place) {
    return (static_cast<int64_t>(number & 1) * kPeers + sender) * kWords + place;
  }

  static __device__ __forceinline__ uint64_t word(float value, uint32_t number) {
    return static_cast<uint64_t>(number) << 32 | __float_as_uint(value);
  }

  static __device__ __forceinline__ bool is_of(WordPair words, uint32_t number) {
    return static_cast<uint32_t>(words.first >> 32) == number &&
           static_cast<uint32_t>(words.second >> 32) == number;
  }

  // When the wait was first seen to be long. Past the limit the host is told and the kernel ends:
  // nothing else could end it.
  __device__ __forceinline__ uint64_t look_at_clock(uint64_t begun, uint32_t number, int i) const {
    const uint64_t now = nanoseconds();
    if (begun == 0) return now;
    if (limit_ms != 0 && now - begun > static_cast<uint64_t>(limit_ms) * 1000000u) {
      store_system(fault + 1, rank);
      store_system(fault + 2, (rank + i + 1) % kRanks);
      store_system(fault + 3, exchange);
      store_system(fault + 4, static_cast<int>(number));
      fence_system();
      store_system(fault, 1);
      fence_system();
      trap();
    }
    return begun;
  }
};
