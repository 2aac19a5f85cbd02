// The activations of the prefill GEMM: panels of 64 columns of K, 128 bytes per row.
//
// A panel holds [rows][64] bf16 of one matrix; panels follow each other. Columns beyond K (a
// multiple of 32) are zeros. Rows that start at a multiple of 8 are contiguous within a panel: one
// bulk copy moves them to shared memory in the layout of wgmma.
//
// Order inside a row: of each 32 values, chunk q (16 bytes, q = 0 … 3) holds pair q (values 2q,
// 2q + 1) of each of the four groups of 8, because a lane of the packed weight holds such a group.
// Chunk c (0 … 7) of row r is stored at chunk c ^ (r % 8), the 128-byte swizzle.
#pragma once

#include "types.cuh"

constexpr int kPanelColumns = 64;
constexpr int kPanelRowBytes = 128;

// The offset of chunk ``chunk`` (0 … 7 of a panel) of a row, in bytes.
__device__ __forceinline__ size_t panel_chunk(int panel, int chunk, int row, int rows) {
  return (static_cast<size_t>(panel) * rows + row) * kPanelRowBytes + ((chunk ^ (row & 7)) << 4);
}

// Return chunk ``chunk`` of a panel's row, from 64 values in natural order (32 words).
template <typename Words>
__device__ __forceinline__ uint4 panel_chunk_of(const Words& word, int chunk) {
  const int first = (chunk >> 2) * 16 + (chunk & 3);
  return make_uint4(word(first), word(first + 4), word(first + 8), word(first + 12));
}
