// LazyGatedDelta of prompts, second launch: advance the state through a sequence's chunks in order.
//
//   positions, row_start, state_slot, replay_count, state_pool   as in kernel.cu
//   output                    bf16 [T, Hv·Dv], out: rounded, without norm and gate
//   workspace_keys, workspace_values, workspace_products, workspace_scales, first_place
//                             in, from prepare_chunks.cu
//
// Grid (COLUMN_CTAS · value heads, sequences): CTAs of a head share its columns. A warp holds 16
// columns of the state, with all rows, in registers. The transposed state is the left operand of
// every product, so sums of one product are the operand of the next without a copy. The operands of
// two chunks (82 KB each with half of the columns of a 128) are in shared memory; a warp computes
// 504 products of 16×8×16 per chunk.
#include "device/chunks.cuh"

namespace {

constexpr int kColumns = kValueWidth / Config::kColumnCtas, kThreads = 2 * kColumns;
constexpr int kValueStride = kColumns + kPadding;
static_assert(kColumns % 16 == 0, "a warp has 16 columns");
constexpr int kTiles = kChunk / 8, kStateTiles = kKeyWidth / 8;

// A stage in shared memory, in bf16, followed by its scales.
constexpr int kQueries = kChunk * kKeyStride, kStageValues = 2 * kQueries;
constexpr int kStageProducts = kStageValues + kChunk * kValueStride;
constexpr int kStageScales = kStageProducts + kProducts * kChunk * kSquareStride;
constexpr int kStage = kStageScales + 2 * kScales * kChunk;
static_assert(2 * (2 * kStage + kChunk * kValueStride) == Config::kSharedBytes,
              "as the launch says");

using Sums = float[kTiles][4];

// Copy `count` rows of `width` bf16, `pitch` apart, into rows `stride` apart.
__device__ __forceinline__ void copy_rows(uint16_t* to, const uint16_t* from, int count, int width,
                                          int pitch, int stride) {
  const int units = width / 8;
  for (int i = threadIdx.x; i < count * units; i += kThreads) {
    cp_async_16(to + i / units * stride + i % units * 8, from + i / units * pitch + i % units * 8);
  }
}

// Split 16 columns k of sums, which are rows of the product, into the left operand: high and low
// parts.
__device__ __forceinline__ void operand_of(const float (&first)[4], const float (&second)[4],
                                           uint32_t (&high)[4], uint32_t (&low)[4]) {
  split_pair(first[0], first[1], high[0], low[0]);
  split_pair(first[2], first[3], high[1], low[1]);
  split_pair(second[0], second[1], high[2], low[2]);
  split_pair(second[2], second[3], high[3], low[3]);
}

// sums += left · right of two tiles; `right` is in the layout of ldmatrix.
__device__ __forceinline__ void multiply(float (&first)[4], float (&second)[4],
                                         const uint32_t (&left)[4], const uint32_t (&right)[4]) {
  const uint32_t one[2] = {right[0], right[1]}, two[2] = {right[2], right[3]};
  mma_bf16(first, left, one);
  mma_bf16(second, left, two);
}

// sums [16, 64] += left [16, 64] · rightᵀ, where right is a lower triangle [64, 64] in two parts.
__device__ __forceinline__ void multiply_lower(Sums& sums, const Sums& left, const uint16_t* high,
                                               const uint16_t* low) {
#pragma unroll
  for (int k = 0; k < kChunk / 16; ++k) {
    uint32_t left_high[4], left_low[4];
    operand_of(left[2 * k], left[2 * k + 1], left_high, left_low);
#pragma unroll
    for (int n = k; n < kChunk / 16; ++n) {
      uint32_t right[4], rest[4];
      ldmatrix_x4(right, columns_by_rows(high, kSquareStride, 16 * n, 16 * k));
      ldmatrix_x4(rest, columns_by_rows(low, kSquareStride, 16 * n, 16 * k));
      multiply(sums[2 * n], sums[2 * n + 1], left_high, right);
      multiply(sums[2 * n], sums[2 * n + 1], left_low, right);
      multiply(sums[2 * n], sums[2 * n + 1], left_high, rest);
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    apply_chunks(const int* positions, const int* row_start, const int* state_slot,
                 const int* replay_count, float* state_pool, uint16_t* output,
                 const uint16_t* workspace_keys, const uint16_t* workspace_values,
                 const uint16_t* workspace_products, const float* workspace_scales,
                 int first_place) {
  DYNAMIC_SHARED(uint16_t, shared);
  pdl_launch_dependents();
  pdl_wait();
  const int head = blockIdx.x / Config::kColumnCtas, b = blockIdx.y, key_head = head / kSharers;
  const int first_column = blockIdx.x % Config::kColumnCtas * kColumns;
  const ChunkedRows of(b, row_start, positions, replay_count);
  // The sequence's chunks among those of the workspaces.
  const int begin = of.first / kChunk;
  const int first = max(begin, first_place);
  const int until = min(begin + of.count / kChunk, first_place + Config::kPlaces);
  if (first >= until) return;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int column = warp * 16 + lane / 4;  // of the CTA, and the eighth after it
  const int64_t slot = load_l2_int(state_slot + b);
  float* const state =
      state_pool + (slot * kValueHeads + head) * kKeyWidth * kValueWidth + first_column;
  uint16_t* const mixed = shared + 2 * kStage;  // [kChunk][kValueStride]

  const auto load = [&](int place) {
    if (place < until) {
      uint16_t* const to = shared + (place - first) % 2 * kStage;
      const int64_t chunk = place - first_place, own = chunk * kValueHeads + head;
      const uint16_t* const keys = workspace_keys + (chunk * kKeyHeads + key_head) * kKeyChunk;
      copy_rows(to, keys, 2 * kChunk, kKeyWidth, kKeyWidth, kKeyStride);
      copy_rows(to + kStageValues, workspace_values + own * kValueChunk + first_column, kChunk,
                kColumns, kValueWidth, kValueStride);
      copy_rows(to + kStageProducts, workspace_products + own * kProductChunk, kProducts * kChunk,
                kChunk, kChunk, kSquareStride);
      copy_rows(to + kStageScales,
                reinterpret_cast<const uint16_t*>(workspace_scales + own * kScales * kChunk),
                kScales, 2 * kChunk, 2 * kChunk, 2 * kChunk);
    }
    cp_async_commit();
  };
  load(first);
  load(first + 1);

  float s[kStateTiles][4];  // rows: columns of the state
  const bool starts = of.position == 0 && first == begin;
#pragma unroll
  for (int n = 0; n < kStateTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = n * 8 + lane % 4 * 2 + i % 2;
      s[n][i] = starts ? 0.0f : load_l2_float(state + key * kValueWidth + column + i / 2 * 8);
    }
  }

#pragma unroll 1
  for (int place = first; place < until; ++place) {
    cp_async_wait<1>();
    __syncthreads();
    const uint16_t* const keys = shared + (place - first) % 2 * kStage;
    const uint16_t* const queries = keys + kQueries;
    const uint16_t* const values = keys + kStageValues;
    const uint16_t* const products = keys + kStageProducts;
    const float* const scales = reinterpret_cast<const float*>(keys + kStageScales);
    const auto scale_of = [&](Scale which, int n) {
      return *reinterpret_cast<const float2*>(scales + which * kChunk + n * 8 + lane % 4 * 2);
    };

    Sums x = {}, o = {};
#pragma unroll
    for (int k = 0; k < kKeyWidth / 16; ++k) {
      uint32_t high[4], low[4];
      operand_of(s[2 * k], s[2 * k + 1], high, low);
#pragma unroll
      for (int n = 0; n < kChunk / 16; ++n) {
        uint32_t of_keys[4], of_queries[4];
        ldmatrix_x4(of_keys, columns_by_rows(keys, kKeyStride, 16 * n, 16 * k));
        ldmatrix_x4(of_queries, columns_by_rows(queries, kKeyStride, 16 * n, 16 * k));
        multiply(x[2 * n], x[2 * n + 1], high, of_keys);
        multiply(o[2 * n], o[2 * n + 1], high, of_queries);
        multiply(x[2 * n], x[2 * n + 1], low, of_keys);
        multiply(o[2 * n], o[2 * n + 1], low, of_queries);
      }
    }
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      uint32_t four[4];
      ldmatrix_x4_transposed(four, columns_by_rows(values, kValueStride, 8 * n, warp * 16));
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const float2 by = scale_of(kOfKeys, n + tile), of_query = scale_of(kOfQueries, n + tile);
        const float2 upper = unpack_bf16x2(four[2 * tile]),
                     under = unpack_bf16x2(four[2 * tile + 1]);
        float (&row)[4] = x[n + tile];
        row[0] = __fmaf_rn(-by.x, row[0], upper.x), row[1] = __fmaf_rn(-by.y, row[1], upper.y);
        row[2] = __fmaf_rn(-by.x, row[2], under.x), row[3] = __fmaf_rn(-by.y, row[3], under.y);
        float (&out)[4] = o[n + tile];
        out[0] *= of_query.x, out[1] *= of_query.y, out[2] *= of_query.x, out[3] *= of_query.y;
      }
    }
    Sums u = {};
    multiply_lower(u, x, products + kSolveHigh * kChunk * kSquareStride,
                   products + kSolveLow * kChunk * kSquareStride);
    multiply_lower(o, u, products + kMixHigh * kChunk * kSquareStride,
                   products + kMixLow * kChunk * kSquareStride);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float2 by = scale_of(kOfChanges, n);
      u[n][0] *= by.x, u[n][1] *= by.y, u[n][2] *= by.x, u[n][3] *= by.y;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        mixed[(n * 8 + lane % 4 * 2 + i % 2) * kValueStride + column + i / 2 * 8] =
            float_to_bf16(o[n][i]);
      }
    }
    const float decay = scales[kOfState * kChunk];
#pragma unroll
    for (int n = 0; n < kStateTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = __fmul_rn(s[n][i], decay);
    }
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) {
      uint32_t high[4], low[4];
      operand_of(u[2 * k], u[2 * k + 1], high, low);
#pragma unroll
      for (int n = 0; n < kKeyWidth / 16; ++n) {
        uint32_t of_keys[4];
        ldmatrix_x4_transposed(of_keys, columns_transposed(keys, kKeyStride, 16 * n, 16 * k));
        multiply(s[2 * n], s[2 * n + 1], high, of_keys);
        multiply(s[2 * n], s[2 * n + 1], low, of_keys);
      }
    }
    __syncthreads();
    load(place + 2);

    const int64_t row0 = of.first + (place - begin) * kChunk;
    uint16_t* const to = output + row0 * kValues + head * kValueWidth + first_column;
    constexpr int units = kColumns / 8;
    for (int i = thread; i < kChunk * units; i += kThreads) {
      const int row = i / units, unit = i % units * 8;
      *reinterpret_cast<uint4*>(to + static_cast<int64_t>(row) * kValues + unit) =
          *reinterpret_cast<const uint4*>(mixed + row * kValueStride + unit);
    }
  }
#pragma unroll
  for (int n = 0; n < kStateTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = n * 8 + lane % 4 * 2 + i % 2;
      state[key * kValueWidth + column + i / 2 * 8] = s[n][i];
    }
  }
}
