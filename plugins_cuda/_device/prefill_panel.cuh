// Activations as the prefill GEMM takes them: panels of 64 columns of k, 128 bytes a row.
//
// A panel holds [rows][64] bf16 of one matrix, panels follow each other: k values of a row beyond
// K (K is a multiple of 32) are zeros. Any range of rows that starts at a multiple of 8 is one
// contiguous piece of a panel: one bulk copy, which lands in shared memory as wgmma wants it.
// Order inside a row: of each 32 values, chunk q (16 bytes, q = 0 … 3) takes pair q (values 2q,
// 2q + 1) of each of the four groups of 8, because a lane of the packed weight holds such a group;
// chunk c (0 … 7) of row r then stands at chunk c ^ (r % 8), the 128-byte swizzle.
#pragma once

#include "types.cuh"

constexpr int kPanelColumns = 64;
constexpr int kPanelRowBytes = 128;

// Where chunk ``chunk`` (0 … 7 of a panel) of a row begins.
__device__ __forceinline__ size_t panel_chunk(int panel, int chunk, int row, int rows) {
  return (static_cast<size_t>(panel) * rows + row) * kPanelRowBytes + ((chunk ^ (row & 7)) << 4);
}

// Chunk ``chunk`` of a panel's row, from 64 values in natural order (32 words).
template <typename Words>
__device__ __forceinline__ uint4 panel_chunk_of(const Words& word, int chunk) {
  const int first = (chunk >> 2) * 16 + (chunk & 3);
  return make_uint4(word(first), word(first + 4), word(first + 8), word(first + 12));
}
