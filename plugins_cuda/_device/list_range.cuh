// The slots from which a row of sparse attention (DSA) selects its list.
#pragma once

#include "attention_rows.cuh"

struct ListRange {
  int chain;      // committed slots that the row attends to: 0 to chain − 1
  int nodes;      // its ancestors in the tree, including itself
  int low, late;  // the row selects from slots low to late − 1, and always attends to all others

  __device__ __forceinline__ int others() const {
    return late - low;
  }
};

// The range of the row at view slot ``own``; ``start`` is the first slot of the tree.
__device__ __forceinline__ ListRange list_range(int own, int start, int nodes, int first_tokens,
                                                int recent_tokens) {
  const int chain = min(own + 1, start), position = own < start ? own : start + nodes - 1;
  const int late = min(max(position - recent_tokens + 1, 0), chain);
  return {chain, nodes, min(first_tokens, late), late};
}

template <int words>
__device__ __forceinline__ ListRange list_range(int own, int start, const int* ancestors,
                                                int first_tokens, int recent_tokens) {
  const int nodes = bits_below<words>(ancestors, 32 * words);
  return list_range(own, start, nodes, first_tokens, recent_tokens);
}
