// Tokens as B operands of mma in shared memory: [block of 32 columns][token tile][lane] 16 bytes.
//
// Lane 4g + t holds columns 8t … 8t + 7 of a block of token g. Warp w copies, normalizes and, if it
// multiplies them, reads the blocks of slice w, so each lane accesses only bytes that it wrote. The
// norm has one barrier, and its time is constant up to 8 tokens.
//
// For a few tokens, only the bytes of live tokens can be stored (kRows): [block][token][64 bytes].
// The other lanes read the same bytes; their results are not used.
//
// The sum of squares of a token is computed over a lane's blocks in order, over lanes t by
// butterfly, and over slices in order. This order depends on the width only.
#pragma once

#include "normed_rows.cuh"

constexpr int kTokensPerTile = 8, kFragmentBytes = 512;

// kSlices warps share kBlocks blocks of columns; the last one may have fewer.
template <int kBlocks, int kSlices, int kTokenTiles, int kRows = kTokensPerTile>
struct TokenFragments {
  static constexpr bool kWhole = kRows == kTokensPerTile;
  static constexpr int kBlockBytes = kWhole ? kTokenTiles * kFragmentBytes : kRows * 64;
  static constexpr int kSliceBlocks = ceil_div(kBlocks, kSlices);
  static constexpr int kSliceBytes = kSliceBlocks * kBlockBytes;
  static constexpr int kBytes = kSlices * kSliceBytes;
  static constexpr int kNormWeightBytes = round_up(kBlocks * 64, 128);
  // The stride of a token is 20 floats: float4 reads of eight tokens are then in different banks.
  static constexpr int kMaxSlices = 16, kSumStride = 20;
  static constexpr int kSumBytes = kTokenTiles * kTokensPerTile * kSumStride * 4;
  static constexpr int kNormBytes = kNormWeightBytes + kSumBytes;
  static_assert(kSlices <= kMaxSlices, "sums of squares of 16 slices at most");
  static_assert(kWhole || kTokenTiles == 1, "kRows is for one token tile");

  unsigned char* fragments;  // kBytes

  __device__ __forceinline__ explicit TokenFragments(unsigned char* shared) : fragments(shared) {}

  // Start to copy this warp's part of the norm's weight to ``norm``; the caller commits.
  static __device__ __forceinline__ void fetch_norm(unsigned char* norm, const uint16_t* weight) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp >= kSlices) return;
    const int first = warp * kSliceBlocks * 4;
#pragma unroll
    for (int i = 0; i < kSliceBlocks * 4; i += 32) {
      const int at = first + i + lane;
      if (i + lane < kSliceBlocks * 4 && at < kBlocks * 4) {
        cp_async_16(norm + at * 16, weight + at * 8);
      }
    }
  }

  // Start to copy this warp's slice of ``live`` tokens; address_of(i) is the first element of token
  // i. The caller commits.
  template <class RowAddress>
  __device__ __forceinline__ void fetch(int live, RowAddress address_of) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp >= kSlices) return;
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      const int token = n * kTokensPerTile + lane / 4;
      if (token >= live) continue;
      const uint16_t* from = address_of(token) + warp * kSliceBlocks * 32 + lane % 4 * 8;
#pragma unroll
      for (int b = 0; b < kSliceBlocks; ++b) {
        if (holds(warp, b)) cp_async_16(own(b, n), from + b * 32);
      }
    }
  }

  // Normalize the tokens of fetch() in place, after this lane's copies are complete. ``norm`` has
  // kNormBytes, filled by fetch_norm(). The function has one barrier of the CTA. Before reading
  // slices of other warps, the caller adds another one.
  template <NormRounding rounding>
  __device__ __forceinline__ void norm(unsigned char* norm, float eps) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
    const bool works = warp < kSlices;
    float* sums = reinterpret_cast<float*>(norm + kNormWeightBytes);
    if (works) add_slice(sums, warp, lane);
    __syncthreads();
    if (!works) return;
    if constexpr (!kWhole) {
      if (g >= kRows) return;  // lanes that wrote no bytes
    }
    const unsigned char* weight = norm + warp * kSliceBlocks * 64 + lane % 4 * 16;
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      const float scale = scale_of(sums + (n * kTokensPerTile + g) * kSumStride, eps);
#pragma unroll
      for (int b = 0; b < kSliceBlocks; ++b) {
        if (!holds(warp, b)) continue;
        const uint4 by = *reinterpret_cast<const uint4*>(weight + b * 64);
        *own(b, n) = normed_vector<rounding>(*own(b, n), by, scale);
      }
    }
  }

  // Compute the sums of squares of this warp's slice of normalized tokens. sum_of() reads them
  // after a barrier. ``sums`` has kSumBytes.
  __device__ __forceinline__ void add_squares(float* sums) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < kSlices) add_slice(sums, warp, lane);
  }

  // Return the sum over all slices of a token.
  static __device__ __forceinline__ float sum_of(const float* sums) {
    float sum = 0.0f;
#pragma unroll
    for (int first = 0; first < kSlices; first += 4) {
      const float4 four = *reinterpret_cast<const float4*>(sums + first);
      const float slices[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (first + i < kSlices) sum += slices[i];
      }
    }
    return sum;
  }

  // The address of this lane's 16 bytes of a block of all columns.
  __device__ __forceinline__ uint4* at(int block, int token_tile) const {
    if (!kWhole) {
      const int lane = threadIdx.x % 32;
      return reinterpret_cast<uint4*>(fragments + block * kBlockBytes + lane / 4 % kRows * 64 +
                                      lane % 4 * 16);
    }
    return reinterpret_cast<uint4*>(
        fragments + (block * kTokenTiles + token_tile) * kFragmentBytes + threadIdx.x % 32 * 16);
  }

 private:
  static constexpr bool kEvenSlices = kSliceBlocks * kSlices == kBlocks;

  static __device__ __forceinline__ bool holds(int slice, int block) {
    return kEvenSlices || slice * kSliceBlocks + block < kBlocks;
  }
  __device__ __forceinline__ uint4* own(int block, int token_tile) const {
    return at(threadIdx.x / 32 * kSliceBlocks + block, token_tile);
  }
  __device__ __forceinline__ void add_slice(float* sums, int warp, int lane) const {
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      float sum = 0.0f;
#pragma unroll
      for (int b = 0; b < kSliceBlocks; ++b) {
        if (holds(warp, b)) sum += sum_of_squares(*own(b, n));
      }
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      if constexpr (!kWhole) {
        if (lane / 4 >= kRows) continue;
      }
      if (lane % 4 == 0) sums[(n * kTokensPerTile + lane / 4) * kSumStride + warp] = sum;
    }
  }
  static __device__ __forceinline__ float scale_of(const float* sums, float eps) {
    return rsqrtf(sum_of(sums) * (1.0f / (kBlocks * 32)) + eps);
  }
};
