// AbsorbQuery: a = [q_nope · W_uk,h | rope(q_rope) | 0] of every row and head.
//
//   q          [rows, Q_HEADS, NOPE + ROPE] bf16, in
//   weight     [Q_HEADS·RANK/16, NOPE/32, 512] bf16, in, constant (absorb_query/packing.py)
//   cos, sin   [positions, ROPE/2] fp32, in, constant
//   positions  [rows] int32, in
//   absorbed   [rows, Q_HEADS, ENTRY] bf16, out
//
// Grid (CTAs over RANK, and one more for RoPE; heads; groups of ROWS_OF_CTA rows). A warp holds the
// weights of 32 columns in registers, and multiplies 16 rows at a time. A sum is accumulated over
// NOPE in order, in one accumulator. The bits of a row therefore do not depend on other rows, in
// prompt chunks too.
//
// The weight of a head is read once per ROWS_OF_CTA rows. The 3.9 MB of GLM-4.7-Flash (20 heads,
// 192 to 512) take 0.9 µs at 4.53 TB/s, the 16.8 MB of DeepSeek-V3 3.7 µs.
#include "../_device/bf16.cuh"
#include "../_device/ptx.cuh"
#include "../_device/ptx_load.cuh"

CONFIG

namespace {

constexpr int kThreads = Config::kWarps * 32, kTokens = 16, kColumns = 32;
constexpr int kBlocks = Config::kNope / 32, kHalf = Config::kRope / 2;
constexpr int kHeadWidth = Config::kNope + Config::kRope;
constexpr int kColumnCtas = ceil_div(Config::kRank, kColumns* Config::kWarps);
static_assert(Config::kNope % 32 == 0 && Config::kRank % kColumns == 0 && kHeadWidth % 8 == 0 &&
                  Config::kEntry % 8 == 0,
              "rows are read and written by 16 bytes");

// A warp's 32 columns: 4 products of 8, with 16 bytes per lane of every 32 of NOPE.
struct Columns {
  uint4 weight[4][kBlocks];

  __device__ __forceinline__ Columns(const uint16_t* packed, int first_tile) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const int64_t tile = static_cast<int64_t>(first_tile + n / 2) * kBlocks + b;
        weight[n][b] = load_early16(packed + tile * 512 + n % 2 * 256 + threadIdx.x % 32 * 8);
      }
    }
  }

  // Multiply rows ``low`` and ``high``, this lane's of 16, at its 8 values of every 32.
  __device__ __forceinline__ void multiply(const uint16_t* low, const uint16_t* high,
                                           float (&sums)[4][4]) const {
    uint4 upper[kBlocks], lower[kBlocks];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      upper[b] = load_l2_16(low + 32 * b);
      lower[b] = load_l2_16(high + 32 * b);
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const uint32_t first[4] = {upper[b].x, lower[b].x, upper[b].y, lower[b].y};
      const uint32_t second[4] = {upper[b].z, lower[b].z, upper[b].w, lower[b].w};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        mma_bf16(sums[n], first, {weight[n][b].x, weight[n][b].y});
        mma_bf16(sums[n], second, {weight[n][b].z, weight[n][b].w});
      }
    }
  }
};

__device__ __forceinline__ int64_t place_of(int row, int head) {
  return static_cast<int64_t>(row) * Config::kQHeads + head;
}

// Rotate the RoPE part of a head in rows first … end − 1, and write zeros after it.
__device__ __forceinline__ void turn(const uint16_t* q, const float* cos, const float* sin,
                                     const int* positions, uint16_t* absorbed, int first, int end) {
  const int head = blockIdx.y;
#pragma unroll 4
  for (int i = threadIdx.x; i < (end - first) * kHalf; i += kThreads) {
    const int row = first + i / kHalf, pair = i % kHalf;
    const int64_t at = static_cast<int64_t>(load_l2_int(positions + row)) * kHalf + pair;
    const float c = load_constant_float(cos + at), s = load_constant_float(sin + at);
    const uint16_t* const from = q + place_of(row, head) * kHeadWidth + Config::kNope + pair;
    uint16_t* const to = absorbed + place_of(row, head) * Config::kEntry + Config::kRank + pair;
    const float a = bf16_to_float(load_l2_bf16(from));
    const float b = bf16_to_float(load_l2_bf16(from + kHalf));
    to[0] = float_to_bf16(a * c - b * s);
    to[kHalf] = float_to_bf16(b * c + a * s);
  }
  constexpr int kZeros = Config::kEntry - Config::kRank - Config::kRope;
  if constexpr (kZeros > 0) {
    for (int i = threadIdx.x; i < (end - first) * kZeros; i += kThreads) {
      const int64_t place = place_of(first + i / kZeros, head);
      absorbed[place * Config::kEntry + Config::kRank + Config::kRope + i % kZeros] = 0;
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    absorb_query(const uint16_t* q, const uint16_t* weight, const float* cos, const float* sin,
                 const int* positions, uint16_t* absorbed, int rows) {
  const int head = blockIdx.y, first = blockIdx.z * Config::kRowsOfCta;
  const int end = min(first + Config::kRowsOfCta, rows);
  if (blockIdx.x == kColumnCtas) {
    pdl_wait();
    // The next launch reads older data early (launches.py), so it may start only now.
    pdl_launch_dependents();
    turn(q, cos, sin, positions, absorbed, first, end);
    return;
  }
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int column = (blockIdx.x * Config::kWarps + warp) * kColumns;
  if (column >= Config::kRank) return;
  const Columns columns(weight, (head * Config::kRank + column) / 16);
  pdl_wait();
  pdl_launch_dependents();
#pragma unroll 1
  for (int row = first; row < end; row += kTokens) {
    const int low = row + g, high = row + g + 8;
    const uint16_t* const values = q + 8 * t;
    float sums[4][4] = {};
    columns.multiply(values + place_of(min(low, end - 1), head) * kHeadWidth,
                     values + place_of(min(high, end - 1), head) * kHeadWidth, sums);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int of = half == 0 ? low : high;
      if (of >= end) continue;
      uint32_t pairs[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        pairs[n] = pack_bf16x2(sums[n][2 * half], sums[n][2 * half + 1]);
      }
      *reinterpret_cast<uint4*>(absorbed + place_of(of, head) * Config::kEntry + column + 8 * t) =
          make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }
}
