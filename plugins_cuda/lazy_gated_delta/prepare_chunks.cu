// LazyGatedDelta of prompts, first launch: the part of chunks of 64 rows that needs no state.
//
//   rows, conv_weight, decay_scale, dt_bias, positions, row_start, state_slot, replay_count,
//   tail_pool                 in, as in kernel.cu
//   workspace_keys      bf16  [places, Hk, 2, 64, Dk], out: keys, queries
//   workspace_values    bf16  [places, Hv, 64, Dv], out
//   workspace_products  bf16  [places, Hv, 4, 64, 64], out: by Product (device/chunks.cuh)
//   workspace_scales    f32   [places, Hv, 4, 64], out: by Scale
//   first_place         i32: the place of the launch's first chunk
//
// Grid (key heads, places). For 27B and 2048 rows: reads 42 MB of rows, writes 96 MB.
#include "../_device/normed_rows.cuh"
#include "device/chunks.cuh"

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kPairs = (2 * kKeyWidth + kSharers * kValueWidth) / 2;
constexpr int kRun = 16;  // consecutive rows that a thread convolves, for two channels
constexpr int kDotStride = kChunk + 1;
static_assert(kSharers * kChunk <= kThreads, "a thread has a column of a value head's inverse");

// Shared memory. L replaces queries and keys after their products.
constexpr int kDots = 0, kDotBytes = 2 * kChunk * kDotStride * 4;
constexpr int kUnits = kDotBytes, kUnitBytes = 2 * kChunk * 4;
constexpr int kGates = kUnits + kUnitBytes, kGateBytes = 2 * kSharers * kChunk * 4;
constexpr int kSequence = kGates + kGateBytes, kRowBytes = 2 * kChunk * kKeyStride * 2;
constexpr int kOperands = round_up(kSequence + 4, 16);
constexpr int kLowerBytes = kSharers * kChunk * kChunk * 4;
static_assert(kOperands + (kRowBytes > kLowerBytes ? kRowBytes : kLowerBytes) ==
                  Config::kSharedBytes,
              "as the launch says");

// The first channel of pair `p` of a key head: a query, a key, or a value of one of its heads.
__device__ __forceinline__ int channel_of(int p, int key_head) {
  const int i = 2 * p;
  if (i < kKeyWidth) return key_head * kKeyWidth + i;
  if (i < 2 * kKeyWidth) return kKeys + key_head * kKeyWidth + i - kKeyWidth;
  return 2 * kKeys + key_head * kSharers * kValueWidth + i - 2 * kKeyWidth;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    prepare_chunks(const uint16_t* rows, const uint16_t* conv_weight, const float* decay_scale,
                   const float* dt_bias, const int* positions, const int* row_start,
                   const int* state_slot, const int* replay_count, const uint16_t* tail_pool,
                   uint16_t* workspace_keys, uint16_t* workspace_values,
                   uint16_t* workspace_products, float* workspace_scales, int first_place) {
  DYNAMIC_SHARED(unsigned char, shared);
  pdl_launch_dependents();
  pdl_wait();
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int key_head = blockIdx.x, chunk = blockIdx.y, place = first_place + chunk;
  float* const dots = reinterpret_cast<float*>(shared + kDots);    // [2][kChunk][kDotStride]
  float* const units = reinterpret_cast<float*>(shared + kUnits);  // [2][kChunk]: keys, queries
  float* const sums = reinterpret_cast<float*>(shared + kGates);   // [kSharers][kChunk]: G
  float* const betas = sums + kSharers * kChunk;                   // [kSharers][kChunk]
  volatile int* const sequence = reinterpret_cast<volatile int*>(shared + kSequence);
  uint16_t* const keys = reinterpret_cast<uint16_t*>(shared + kOperands);
  uint16_t* const queries = keys + kChunk * kKeyStride;
  float* const lower = reinterpret_cast<float*>(shared + kOperands);  // [kSharers][column][row]

  const int b = sequence_at<kThreads>(place, row_start, positions, replay_count, sequence);
  if (b < 0) return;
  const ChunkedRows of(b, row_start, positions, replay_count);
  const int row0 = of.first + (place - of.first / kChunk) * kChunk;
  const bool begins = row0 == of.first;
  const int64_t slot = load_l2_int(state_slot + b);
  const uint16_t* const tail = tail_pool + slot * kWindow * kChannels;
  uint16_t* const kept_keys =
      workspace_keys + (static_cast<int64_t>(chunk) * kKeyHeads + key_head) * kKeyChunk;
  uint16_t* const kept_values =
      workspace_values +
      (static_cast<int64_t>(chunk) * kValueHeads + key_head * kSharers) * kValueChunk;

  // The convolution, rounded as in the row loop.
#pragma unroll 1
  for (int item = thread; item < kPairs * (kChunk / kRun); item += kThreads) {
    const int pair = item % kPairs, run = item / kPairs * kRun;
    const int channel = channel_of(pair, key_head);
    // All loads precede the stores, so that their latency is waited for once.
    uint32_t input[kTail + kRun];
#pragma unroll
    for (int i = 0; i < kTail + kRun; ++i) {
      const int r = run + i - kTail;
      if (r < 0 && begins) {
        input[i] = of.position == 0 ? 0 : load_l2_pair(tail + (kTail + r) * kChannels + channel);
      } else {
        input[i] =
            load_l2_pair(rows + static_cast<int64_t>(row0 + r) * Config::kRowWidth + channel);
      }
    }
    float2 weight[Config::kTaps];
#pragma unroll
    for (int tap = 0; tap < Config::kTaps; ++tap) {
      const uint16_t* const from = conv_weight + channel * Config::kTaps + tap;
      weight[tap] = make_float2(bf16_to_float(from[0]), bf16_to_float(from[Config::kTaps]));
    }
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const int r = run + i;
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int tap = 0; tap < Config::kTaps; ++tap) {
        const float2 window = unpack_bf16x2(input[i + tap]);
        sum.x = __fmaf_rn(weight[tap].x, window.x, sum.x);
        sum.y = __fmaf_rn(weight[tap].y, window.y, sum.y);
      }
      const uint32_t value = pack_bf16x2(silu(rounded(sum.x)), silu(rounded(sum.y)));
      const int element = 2 * pair;
      if (element < 2 * kKeyWidth) {
        const bool is_query = element < kKeyWidth;
        const int column = is_query ? element : element - kKeyWidth;
        uint16_t* const operand = is_query ? queries : keys;
        *reinterpret_cast<uint32_t*>(operand + r * kKeyStride + column) = value;
        *reinterpret_cast<uint32_t*>(kept_keys + ((is_query ? kChunk : 0) + r) * kKeyWidth +
                                     column) = value;
      } else {
        const int column = element - 2 * kKeyWidth;
        *reinterpret_cast<uint32_t*>(kept_values + column / kValueWidth * kValueChunk +
                                     r * kValueWidth + column % kValueWidth) = value;
      }
    }
  }
  for (int i = thread; i < kSharers * kChunk; i += kThreads) {
    const int r = i % kChunk, head = key_head * kSharers + i / kChunk;
    const uint16_t* const gates =
        rows + static_cast<int64_t>(row0 + r) * Config::kRowWidth + kChannels + kValues + head;
    betas[i] = beta_of(gates);
    sums[i] = log_decay_of(gates, kValueHeads, decay_scale[head], dt_bias[head]);
  }
  __syncthreads();
  for (int h = warp; h < kSharers; h += kWarps) {  // G: a lane has two rows
    const float2 own = *reinterpret_cast<const float2*>(sums + h * kChunk + 2 * lane);
    float sum = own.x + own.y;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const float before = __shfl_up_sync(kAllLanes, sum, distance);
      if (lane >= distance) sum += before;
    }
    const float before = __shfl_up_sync(kAllLanes, sum, 1);
    *reinterpret_cast<float2*>(sums + h * kChunk + 2 * lane) =
        make_float2((lane > 0 ? before : 0.0f) + own.x, sum);
  }
#pragma unroll 4
  for (int item = warp; item < 2 * kChunk; item += kWarps) {
    const bool is_query = item >= kChunk;
    const uint16_t* const vector = (is_query ? queries : keys) + item % kChunk * kKeyStride;
    float sum = 0.0f;
    for (int i = 2 * lane; i < kKeyWidth; i += 64) {
      const float2 pair = unpack_bf16x2(*reinterpret_cast<const uint32_t*>(vector + i));
      sum = __fmaf_rn(pair.x, pair.x, sum);
      sum = __fmaf_rn(pair.y, pair.y, sum);
    }
    const float scale = rsqrtf(warp_sum(sum) + kUnitEps);
    if (lane == 0) units[item] = is_query ? scale * rsqrtf(static_cast<float>(kKeyWidth)) : scale;
  }

  // K·Kᵀ and Q·Kᵀ, up to the diagonal: a warp has 16 rows of one of them.
  for (int item = warp; item < 2 * (kChunk / 16); item += kWarps) {
    const int of_queries = item / (kChunk / 16), block = item % (kChunk / 16);
    const uint16_t* const by = of_queries ? queries : keys;
    float sum[kChunk / 8][4] = {};
#pragma unroll 2
    for (int k = 0; k < kKeyWidth; k += 16) {
      uint32_t a[4];
      ldmatrix_x4(a, by + (block * 16 + lane % 16) * kKeyStride + k + lane / 16 * 8);
#pragma unroll
      for (int n = 0; n < kChunk / 16; ++n) {
        if (n > block) continue;
        uint32_t two[4];
        ldmatrix_x4(two, columns_by_rows(keys, kKeyStride, 16 * n, k));
        const uint32_t first[2] = {two[0], two[1]}, second[2] = {two[2], two[3]};
        mma_bf16(sum[2 * n], a, first);
        mma_bf16(sum[2 * n + 1], a, second);
      }
    }
    float* const to = dots + of_queries * kChunk * kDotStride;
#pragma unroll
    for (int n = 0; n < kChunk / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = block * 16 + lane / 4 + i / 2 * 8, column = n * 8 + lane % 4 * 2 + i % 2;
        to[row * kDotStride + column] = sum[n][i];
      }
    }
  }
  __syncthreads();

  for (int i = thread; i < kSharers * kChunk * kChunk; i += kThreads) {
    const int h = i / (kChunk * kChunk), column = i / kChunk % kChunk, row = i % kChunk;
    float value = 0.0f;
    if (row > column) {
      const float decay = expf(sums[h * kChunk + row] - sums[h * kChunk + column]);
      value = betas[h * kChunk + row] * (units[row] * units[column]) *
              (dots[row * kDotStride + column] * decay);
    }
    lower[i] = value;
  }
  uint16_t* const products =
      workspace_products +
      (static_cast<int64_t>(chunk) * kValueHeads + key_head * kSharers) * kProductChunk;
  for (int i = thread; i < kSharers * kChunk * kChunk / 2; i += kThreads) {
    const int h = i / (kChunk * kChunk / 2), row = i / (kChunk / 2) % kChunk;
    const int column = 2 * (i % (kChunk / 2));
    const float* const of_row = dots + (kChunk + row) * kDotStride;
    float pair[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int j = column + c;
      const float decay = row >= j ? expf(sums[h * kChunk + row] - sums[h * kChunk + j]) : 0.0f;
      pair[c] = row >= j ? units[kChunk + row] * units[j] * (of_row[j] * decay) : 0.0f;
    }
    uint32_t high, low;
    split_pair(pair[0], pair[1], high, low);
    uint16_t* const to = products + h * kProductChunk + row * kChunk + column;
    *reinterpret_cast<uint32_t*>(to + kMixHigh * kChunk * kChunk) = high;
    *reinterpret_cast<uint32_t*>(to + kMixLow * kChunk * kChunk) = low;
  }
  for (int i = thread; i < kSharers * kChunk; i += kThreads) {
    const int h = i / kChunk, r = i % kChunk;
    const float own = sums[i], all = sums[h * kChunk + kChunk - 1], decay = expf(own);
    float* const to =
        workspace_scales +
        (static_cast<int64_t>(chunk) * kValueHeads + key_head * kSharers + h) * kScales * kChunk +
        r;
    to[kOfKeys * kChunk] = units[r] * decay;
    to[kOfQueries * kChunk] = units[kChunk + r] * decay;
    to[kOfChanges * kChunk] = units[r] * expf(all - own);
    to[kOfState * kChunk] = expf(all);
  }
  __syncthreads();

  // (I + L)⁻¹ by substitution in fp32: a thread has a column, in registers.
  const int h = thread / kChunk, column = thread % kChunk;
  if (h >= kSharers) return;
  float x[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) x[i] = i == column ? 1.0f : 0.0f;
  const float* const of_head = lower + h * kChunk * kChunk;
#pragma unroll
  for (int m = 0; m < kChunk - 1; ++m) {
#pragma unroll
    for (int i = (m + 1) / 4 * 4; i < kChunk; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(of_head + m * kChunk + i);
      if (i > m) x[i] = __fmaf_rn(-four.x, x[m], x[i]);
      if (i + 1 > m) x[i + 1] = __fmaf_rn(-four.y, x[m], x[i + 1]);
      if (i + 2 > m) x[i + 2] = __fmaf_rn(-four.z, x[m], x[i + 2]);
      if (i + 3 > m) x[i + 3] = __fmaf_rn(-four.w, x[m], x[i + 3]);
    }
  }
  const float beta = betas[h * kChunk + column];
  uint16_t* const to = products + h * kProductChunk + column;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const float value = x[i] * beta;
    const uint16_t high = float_to_bf16(value);
    to[kSolveHigh * kChunk * kChunk + i * kChunk] = high;
    to[kSolveLow * kChunk * kChunk + i * kChunk] = float_to_bf16(value - bf16_to_float(high));
  }
}
