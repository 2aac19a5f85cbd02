// The visible keys of a row, by position.
#pragma once

#include "types.cuh"

// Position p <= chain is view slot p. Position tree_start + n is the row's n-th ancestor in the
// tree (the last one is the row itself), regardless of its slot.
struct RowView {
  int first;  // the first position of the window
  int chain;  // the last committed position, below tree_start
  int tree_start;
  int last;  // the last position in the tree, or -1 if ``chain`` is the last position

  __device__ __forceinline__ bool sees(int position) const {
    return position >= first && (position <= chain || (position >= tree_start && position <= last));
  }

  // The last visible position.
  __device__ __forceinline__ int end() const {
    return last >= 0 ? last : chain;
  }
};

// Return how many bits of the `words` ancestor words are set below bit `bit`.
template <int words>
__device__ __forceinline__ int bits_below(const int* ancestors, int bit) {
  int count = 0;
#pragma unroll
  for (int word = 0; word < words; ++word) {
    const int below = bit - 32 * word;
    const uint32_t mask = below >= 32 ? ~0u : below > 0 ? (1u << below) - 1u : 0u;
    count += __popc(static_cast<uint32_t>(ancestors[word]) & mask);
  }
  return count;
}

// Return the index of set bit number `n`; more than `n` bits are set.
template <int words>
__device__ __forceinline__ int set_bit(const int* ancestors, int n) {
#pragma unroll
  for (int word = 0; word < words; ++word) {
    uint32_t bits = static_cast<uint32_t>(ancestors[word]);
    const int count = __popc(bits);
    if (n < count) {
      for (; n > 0; --n) bits &= bits - 1;
      return 32 * word + __ffs(static_cast<int>(bits)) - 1;
    }
    n -= count;
  }
  return 0;
}

// Return the view of the row at view slot `slot`; `window` 0 means no window. If the ancestors fill
// the first slots of the tree without a gap, slots equal positions, and they count as chain.
template <int words, int window>
__device__ __forceinline__ RowView view_of(int slot, int tree_start, const int* ancestors) {
  const int seen = bits_below<words>(ancestors, 32 * words);
  const int above = slot - tree_start;
  const int position = above < 0 ? slot : tree_start + bits_below<words>(ancestors, above);
  const int first = window > 0 && position >= window ? position - window + 1 : 0;
  const int chain = above < 0 ? slot : tree_start - 1;
  const int last = seen > 0 ? tree_start + seen - 1 : -1;
  const bool gapless = above >= 0 && bits_below<words>(ancestors, seen) == seen;
  return {first, gapless ? max(chain, last) : chain, tree_start, gapless ? -1 : last};
}
