// RMS norm of rows by one CTA: bf16 rows in, normalized bf16 rows in shared memory.
//
// The sum of squares of a row is computed over pieces of 256 elements: each lane adds 8, lanes are
// reduced by butterfly, pieces are added in order. This order depends on the width only, not on the
// number of rows or warps.
#pragma once

#include "bf16.cuh"
#include "ptx.cuh"

constexpr int kPieceElements = 256;

// The numbers of rms_norms.py. kOffsetInFp32: as kWeightInFp32, with 1 + the weight.
enum class NormRounding { kWeightInFp32, kCastFirst, kOffsetInFp32 };

__device__ __forceinline__ float sum_of_squares(uint4 v) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack_bf16x2(words[i]);
    sum = fmaf(pair.x, pair.x, sum);
    sum = fmaf(pair.y, pair.y, sum);
  }
  return sum;
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, offset);
  }
  return value;
}

template <NormRounding rounding>
__device__ __forceinline__ uint32_t normed_pair(uint32_t x, uint32_t weight, float scale) {
  const float2 v = unpack_bf16x2(x), w = unpack_bf16x2(weight);
  if (rounding == NormRounding::kCastFirst) {
    return mul_bf16x2(pack_bf16x2(v.x * scale, v.y * scale), weight);
  }
  if (rounding == NormRounding::kOffsetInFp32) {
    return pack_bf16x2(v.x * scale * (1.0f + w.x), v.y * scale * (1.0f + w.y));
  }
  return pack_bf16x2(v.x * scale * w.x, v.y * scale * w.y);
}

template <NormRounding rounding>
__device__ __forceinline__ uint4 normed_vector(uint4 x, uint4 weight, float scale) {
  return make_uint4(
      normed_pair<rounding>(x.x, weight.x, scale), normed_pair<rounding>(x.y, weight.y, scale),
      normed_pair<rounding>(x.z, weight.z, scale), normed_pair<rounding>(x.w, weight.w, scale));
}

// Rows of kWidth elements in shared memory, kStrideBytes apart, and the buffers of their norm.
template <int kWidth, int kWarps, NormRounding rounding>
struct NormedRows {
  static_assert(kWidth % 8 == 0, "rows are read by 16 bytes");
  static constexpr int kElements = kWidth;
  static constexpr int kPieces = ceil_div(kWidth, kPieceElements);
  // 16 bytes of each of 8 rows, one per lane, are then in different banks.
  static constexpr int kStrideBytes = round_up(kWidth * 2, 128) + 64;
  static constexpr int kWeightBytes = round_up(kWidth * 2, 128);
  static __host__ __device__ constexpr int sums_bytes(int rows) {
    return round_up(rows * kPieces * 4, 128);
  }

  static __host__ __device__ constexpr int bytes(int rows) {
    return kWeightBytes + sums_bytes(rows) + rows * kStrideBytes;
  }

  unsigned char* weight;  // [kWidth] bf16
  float* sums;            // [rows, kPieces]
  unsigned char* rows;    // [rows, kStrideBytes]

  // Use ``bytes(max_rows)`` of shared memory, with the rows last.
  __device__ __forceinline__ NormedRows(unsigned char* shared, int max_rows)
      : weight(shared),
        sums(reinterpret_cast<float*>(shared + kWeightBytes)),
        rows(shared + kWeightBytes + sums_bytes(max_rows)) {}

  // Start to copy the weight of the norm; the caller commits the group of copies.
  __device__ __forceinline__ void fetch_weight(const uint16_t* global) const {
#pragma unroll
    for (int first = 0; first < kWidth / 8; first += kWarps * 32) {
      const int i = first + threadIdx.x;
      if (i < kWidth / 8) cp_async_16(weight + i * 16, global + i * 8);
    }
  }

  // Read ``count`` rows and their sums of squares; row_address(i) is the first element of row i.
  template <class RowAddress>
  __device__ __forceinline__ void read(int count, RowAddress row_address) const {
    constexpr int kBatch = 4;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int first = warp; first < count * kPieces; first += kBatch * kWarps) {
      uint4 held[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int item = first + i * kWarps, element = element_of(item, lane);
        held[i] = make_uint4(0, 0, 0, 0);
        if (item < count * kPieces && element < kWidth) {
          held[i] = load_l2_16(row_address(item / kPieces) + element);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int item = first + i * kWarps, element = element_of(item, lane);
        if (item >= count * kPieces) break;
        if (element < kWidth) *vector(item / kPieces, element) = held[i];
        const float sum = warp_sum(sum_of_squares(held[i]));
        if (lane == 0) sums[item] = sum;
      }
    }
  }

  // Normalize the rows of read(). A barrier must precede and follow.
  __device__ __forceinline__ void norm(int count, float eps) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int item = warp; item < count * kPieces; item += kWarps) {
      const int row = item / kPieces, element = element_of(item, lane);
      float sum = 0.0f;
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) sum += sums[row * kPieces + piece];
      const float scale = rsqrtf(sum * (1.0f / kWidth) + eps);
      if (element < kWidth) {
        uint4* place = vector(row, element);
        const uint4 w = *reinterpret_cast<const uint4*>(weight + element * 2);
        *place = normed_vector<rounding>(*place, w, scale);
      }
    }
  }

 private:
  static __device__ __forceinline__ int element_of(int item, int lane) {
    return item % kPieces * kPieceElements + lane * 8;
  }
  __device__ __forceinline__ uint4* vector(int row, int element) const {
    return reinterpret_cast<uint4*>(rows + row * kStrideBytes + element * 2);
  }
};
