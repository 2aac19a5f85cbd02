// What a row of a launch sees, by position.
#pragma once

#include "types.cuh"

// Position p <= chain is view slot p; position tree_start + n is the row's n-th ancestor in the
// tree (itself last), wherever its slot is.
struct RowView {
  int first;  // the window's first position
  int chain;  // the last committed position, below tree_start
  int tree_start;
  int last;  // the last position in the tree, -1 where `chain` is the last of all

  __device__ __forceinline__ bool sees(int position) const {
    return position >= first && (position <= chain || (position >= tree_start && position <= last));
  }

  // The last position that the row sees.
  __device__ __forceinline__ int end() const {
    return last >= 0 ? last : chain;
  }
};

// How many of the `words` ancestor words' bits stand below bit `bit`.
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

// The place of set bit number `n`, of which there are more.
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

// The view of the row at view slot `slot`; `window` 0 is none. A lineage that fills the tree's
// slots from its first on without a gap stands at its positions already: it continues the chain.
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
