// A round of an exchange: every rank stores its values to the inboxes of all others, and waits for
// their values in its own inbox.
//
// A word is {fp32 bits, round number}. Rounds are numbered from 1 and alternate between two slots.
// Two slots suffice: a rank that stores round n has received a word of round n − 1 from every peer,
// and a peer sends that after its polls of round n − 2. This holds for each word separately if one
// thread processes it on every rank, or if a later launch polls.
#pragma once

#include "ptx.cuh"
#include "ptx_peer.cuh"
#include "ptx_system.cuh"

// The number of polls between two reads of the clock.
constexpr int kPollsPerClockRead = 1024;

// A slot has ``kWords`` words of each sender.
template <int kRanks, int kWords>
struct RankExchange {
  static_assert(kRanks >= 2 && kRanks <= 8 && kWords % 2 == 0);
  static constexpr int kPeers = kRanks - 1;

  uint64_t* inbox;             // of this rank: [2 slots, kPeers senders by distance − 1, kWords]
  uint64_t* inbox_on[kPeers];  // of the rank at distance i + 1, modulo the ranks
  int* fault;                  // [8], in host memory
  int rank, exchange;
  uint32_t epoch, limit_ms;

  // ``state`` [2]: the rounds before this program, and the time limit. Call it after
  // griddepcontrol.wait.
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

  // The number of the i-th round of a program.
  __device__ __forceinline__ uint32_t number(int round) const {
    return epoch + 1u + static_cast<uint32_t>(exchange + round);
  }

  // Store two adjacent values, the first at an even index, to all peers.
  __device__ __forceinline__ void push(uint32_t number, int place, float2 values) const {
#pragma unroll
    for (int i = 0; i < kPeers; ++i) {
      // As seen from the rank at distance i + 1, this rank is at distance kRanks − 1 − i.
      store_words(inbox_on[i] + at(number, kPeers - 1 - i, place), word(values.x, number),
                  word(values.y, number));
    }
  }

  // Load the words from the rank at distance i + 1, which may be of an earlier round.
  __device__ __forceinline__ WordPair load(uint32_t number, int i, int place) const {
    return load_words(inbox + at(number, i, place));
  }

  // Poll until both words are of this round.
  __device__ __forceinline__ float2 wait(WordPair words, uint32_t number, int i, int place) const {
    uint64_t begun = 0;
    for (int tries = 1; !is_of(words, number); ++tries) {
      if (tries % kPollsPerClockRead == 0) begun = check_clock(begun, number, i);
      words = load(number, i, place);
    }
    return make_float2(__uint_as_float(static_cast<uint32_t>(words.first)),
                       __uint_as_float(static_cast<uint32_t>(words.second)));
  }

  // Return the sum over all ranks in the order of ranks, which is the same everywhere. ``own`` are
  // the values of this rank, ``peers`` those of the others by distance.
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

  // Return the time of the first check of a long wait. After the limit it reports the fault to the
  // host and ends the kernel, because nothing else can.
  __device__ __forceinline__ uint64_t check_clock(uint64_t begun, uint32_t number, int i) const {
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
