// Chunks of 64 rows of a prompt: which rows they have, and what the first launch leaves the second.
//
// With rows i, j of a chunk, G_i the sum of the exponents of decay up to row i, and the chunk's
// initial state S (as the step has them: k and q normed, q scaled, β, v):
//
//   L_ij = β_i (k_i·k_j) e^{G_i−G_j}, j < i        U = (I + L)⁻¹ diag(β) (V − diag(e^G) K S)
//   A_ij = (q_i·k_j) e^{G_i−G_j}, j ≤ i            O = diag(e^G) Q S + A U
//                                                  S ← e^{G_63} S + Kᵀ diag(e^{G_63−G}) U
//
// Keys, queries and values of the convolution are bf16, and a norm is one factor of a row. So the
// tensor cores multiply them exactly, unnormed, and sums take the factors. Other operands are split
// in two bf16 numbers, high and low: their products have 16 bits. The state stays in fp32.
//
// A chunk's place in the workspaces is its first row in the launch divided by 64, which no two
// chunks share.
#pragma once

#include "../../_device/bf16.cuh"
#include "../../_device/ptx.cuh"
#include "config.cuh"
#include "inputs.cuh"

constexpr int kChunk = 64;
constexpr int kKeyWidth = Config::kKeyWidth, kValueWidth = Config::kValueWidth;
constexpr int kKeyHeads = Config::kKeyHeads, kValueHeads = Config::kValueHeads;
constexpr int kKeys = kKeyHeads * kKeyWidth, kValues = kValueHeads * kValueWidth;
constexpr int kSharers = kValueHeads / kKeyHeads;
static_assert(kKeyWidth % 16 == 0 && kValueWidth % 16 == 0, "whole fragments");

// bf16 of a row in shared memory: rows of a fragment are in different banks.
constexpr int kPadding = 8;
constexpr int kKeyStride = kKeyWidth + kPadding, kSquareStride = kChunk + kPadding;

// Products of a chunk, [kChunk, kChunk] each: (I + L)⁻¹ diag(β) and A, high and low parts.
enum Product { kSolveHigh, kSolveLow, kMixHigh, kMixLow, kProducts };
// Factors of a chunk, [kChunk] each: of K S, of Q S, of U in the sum with Kᵀ; e^{G_63}.
enum Scale { kOfKeys, kOfQueries, kOfChanges, kOfState, kScales };

// bf16 of a chunk in the workspaces: keys, then queries, of a key head; the rest of a value head.
constexpr int64_t kKeyChunk = 2 * kChunk * kKeyWidth, kValueChunk = kChunk * kValueWidth;
constexpr int64_t kProductChunk = kProducts * kChunk * kChunk;

// The places of sequence `b`: its first row in the launch, and its rows in chunks.
struct ChunkedRows {
  int first, position, count;

  __device__ __forceinline__ ChunkedRows(int b, const int* row_start, const int* positions,
                                         const int* replay_count) {
    first = load_l2_int(row_start + b);
    const int rows = load_l2_int(row_start + b + 1) - first;
    position = rows > 0 ? load_l2_int(positions + first) : 0;
    count = rows_in_chunks(position, rows, load_l2_int(replay_count + b));
  }
};

// Lane addresses of ldmatrix for two tiles of eight columns n and 16 values k: of B where memory
// has rows n, and where it has rows k (transposed).
__device__ __forceinline__ const uint16_t* columns_by_rows(const uint16_t* of, int stride, int n,
                                                           int k) {
  const int lane = threadIdx.x % 32;
  return of + (n + lane / 16 * 8 + lane % 8) * stride + k + lane / 8 % 2 * 8;
}
__device__ __forceinline__ const uint16_t* columns_transposed(const uint16_t* of, int stride, int n,
                                                              int k) {
  const int lane = threadIdx.x % 32;
  return of + (k + lane / 8 % 2 * 8 + lane % 8) * stride + n + lane / 16 * 8;
}

// A pair of numbers as two pairs of bf16, which add up to 16 of their bits.
__device__ __forceinline__ void split_pair(float first, float second, uint32_t& high,
                                           uint32_t& low) {
  high = pack_bf16x2(first, second);
  low = pack_bf16x2(first - bf16_low_to_float(high), second - bf16_high_to_float(high));
}
