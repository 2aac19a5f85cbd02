// Chunks of 64 rows of a prompt: their rows, and the operands that the first launch prepares.
//
// For rows i, j of a chunk, let G_i be the sum of the exponents of decay up to row i, and S the
// chunk's initial state. k and q are normalized, q is scaled, as in a step:
//
//   L_ij = β_i (k_i·k_j) e^{G_i−G_j}, j < i        U = (I + L)⁻¹ diag(β) (V − diag(e^G) K S)
//   A_ij = (q_i·k_j) e^{G_i−G_j}, j ≤ i            O = diag(e^G) Q S + A U
//                                                  S ← e^{G_63} S + Kᵀ diag(e^{G_63−G}) U
//
// Keys, queries and values of the convolution are bf16, and a norm is one factor of a row. Tensor
// cores therefore multiply them exactly before their norm, and sums are multiplied by the factors.
// Other operands are split into two bf16 numbers, high and low, for products of 16 bits. The state
// stays in fp32.
//
// The place of a chunk in the workspaces is its first row in the launch divided by 64, which is
// unique.
#pragma once

#include "../../_device/bf16.cuh"
#include "../../_device/ptx.cuh"
#include "inputs.cuh"

constexpr int kChunk = 64;
constexpr int kKeyHeads = Config::kKeyHeads, kValueHeads = Config::kValueHeads;
static_assert(kKeyWidth % 16 == 0 && kValueWidth % 16 == 0, "whole fragments");

// Padding of rows in shared memory, in bf16, so that rows of a fragment are in different banks.
constexpr int kPadding = 8;
constexpr int kKeyStride = kKeyWidth + kPadding, kSquareStride = kChunk + kPadding;

// Products of a chunk, [kChunk, kChunk] each: (I + L)⁻¹ diag(β) and A, high and low parts.
enum Product { kSolveHigh, kSolveLow, kMixHigh, kMixLow, kProducts };
// Factors of a chunk, [kChunk] each: of K S, of Q S, of U in the sum with Kᵀ; e^{G_63}.
enum Scale { kOfKeys, kOfQueries, kOfChanges, kOfState, kScales };

// Sizes of a chunk in the workspaces, in bf16: keys, then queries, per key head; the rest per value
// head.
constexpr int64_t kKeyChunk = 2 * kChunk * kKeyWidth, kValueChunk = kChunk * kValueWidth;
constexpr int64_t kProductChunk = kProducts * kChunk * kChunk;

// The rows of sequence `b`: the first in the launch, its position, and the rows in chunks.
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

// Return the sequence whose chunk has the place `place`, or -1. All threads call it; `found` is in
// shared memory.
template <int kThreads>
__device__ __forceinline__ int sequence_at(int place, const int* row_start, const int* positions,
                                           const int* replay_count, volatile int* found) {
  if (threadIdx.x == 0) *found = -1;
  __syncthreads();
  for (int b = threadIdx.x; b < Config::kBatch; b += kThreads) {
    const ChunkedRows of(b, row_start, positions, replay_count);
    const int begin = of.first / kChunk;
    if (begin <= place && place < begin + of.count / kChunk) *found = b;
  }
  __syncthreads();
  return *found;
}

// Lane addresses of ldmatrix for two B tiles of eight columns n and 16 values k: for memory with
// rows n, and for memory with rows k (transposed).
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

// Split two numbers into pairs of bf16 that add up to 16 of their bits.
__device__ __forceinline__ void split_pair(float first, float second, uint32_t& high,
                                           uint32_t& low) {
  high = pack_bf16x2(first, second);
  low = pack_bf16x2(first - bf16_low_to_float(high), second - bf16_high_to_float(high));
}
