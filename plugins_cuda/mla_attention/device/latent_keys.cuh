// Keys rebuilt from latents on tensor cores: K = RoPE(C·W_k + b_k), 64 features per warpgroup.
//
// Config: ENTRY, TILE, KV_HEADS, WIDTH (16, 32 or 64), HAS_BIAS, HELD (steps of 16 values whose
// weights are in registers).
//
// Weights are the A operand, in registers; latents are B. D[64 features, TILE tokens] accumulates
// one wgmma after another over the latent's values. Warp w of a warpgroup has packed rows 16w …
// 16w+15. Rows g and g + 8 of them are features i and i + WIDTH/2 of one head, a pair of RoPE, so
// that a lane rotates its sums. Weights that do not fit in registers are in shared memory. They are
// those of the first values, so that the order of sums is the same.
#pragma once

#include "../../_device/bf16.cuh"
#include "../../_device/ptx_wgmma.cuh"
#include "config.cuh"
#include "latent_walk.cuh"

constexpr int kCtaFeatures = 128;  // of two warpgroups
constexpr int kFeatures = Config::kKvHeads * Config::kWidth;
constexpr int kFeatureGroups = ceil_div(kFeatures, kCtaFeatures);
constexpr int kCtaHeads = kCtaFeatures / Config::kWidth;
constexpr int kGroupHeads = kCtaHeads / 2;  // of a warpgroup
constexpr int kHeadTiles = Config::kWidth / 16;
constexpr int kEntrySteps = Config::kEntry / 16;
constexpr int kHeldSteps = kEntrySteps < Config::kHeld ? kEntrySteps : Config::kHeld;
constexpr int kWaitingSteps = kEntrySteps - kHeldSteps;
constexpr int kWaitingUnits = kWaitingSteps * kLatentThreads;  // of 16 bytes
constexpr int kLoadSteps =
    kEntrySteps < kTile / 8 ? kEntrySteps : kTile / 8;  // of weights that are loaded at once
constexpr int kLoadUnits = kLoadSteps * 16 * 16;
constexpr int kKeyBarrier = 2;  // of the two warpgroups
constexpr int kTableStride =
    Config::kWidth + 4;  // cosines, sines, and padding against bank conflicts
constexpr int kTableUnits = kTile * kTableStride / 4;
static_assert(Config::kWidth == 16 || Config::kWidth == 32 || Config::kWidth == 64,
              "a warpgroup has complete heads");

struct KeyMaker {
  uint32_t held[kHeldSteps][4];
  float sums[kTile / 2];
  const uint4* waiting;  // this lane's weights of the first steps, in shared memory
  float bias[2];

  // The head of this lane's rows in the warpgroup, and the lower of its two features.
  __device__ __forceinline__ static int group_head() {
    return thread_index() / 32 % 4 / kHeadTiles;
  }
  __device__ __forceinline__ static int feature() {
    return thread_index() / 32 % 4 % kHeadTiles * 8 + thread_index() % 32 / 4;
  }
  __device__ __forceinline__ static int warpgroup() {
    return thread_index() / 128;
  }

  // Load features 128 · group … of w [ENTRY, KV_HEADS, WIDTH] through ``space`` (kLoadUnits). Both
  // warpgroups call it. Weights of the first steps go to ``waits`` (kWaitingUnits).
  __device__ __forceinline__ void load(const uint4* w, const uint16_t* biases, int group,
                                       uint4* space, uint4* waits) {
    const int head = warpgroup() * kGroupHeads + group_head();
    const int from = group * kCtaFeatures + head * Config::kWidth + feature();
    bias[0] = bias[1] = 0.0f;
    if (Config::kHasBias && from < kFeatures) {
      bias[0] = bf16_to_float(biases[from]);
      bias[1] = bf16_to_float(biases[from + Config::kWidth / 2]);
    }
    const int lane = thread_index() % 32, matrix = lane / 8;
    const int unit =
        (head * Config::kWidth + feature() / 8 * 8 + matrix % 2 * (Config::kWidth / 2)) / 8;
    waiting = waits + thread_index();
#pragma unroll
    for (int first = 0; first < kEntrySteps; first += kLoadSteps) {
      load_block(w, group, 16 * first, space);
#pragma unroll
      for (int step = first; step < first + kLoadSteps && step < kEntrySteps; ++step) {
        const int k = 16 * (step - first) + matrix / 2 * 8 + lane % 8;
        uint32_t a[4];
        ldmatrix_x4_transposed(a, space + k * 16 + (unit ^ (k % 8)));
        if (step < kWaitingSteps) {
          waits[step * kLatentThreads + thread_index()] = make_uint4(a[0], a[1], a[2], a[3]);
          continue;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) held[step < kWaitingSteps ? 0 : step - kWaitingSteps][i] = a[i];
      }
      named_barrier_sync(kKeyBarrier, kLatentThreads);
    }
  }

  // Start a tile's wgmma; wait() waits for them.
  __device__ __forceinline__ void start(const uint4* stage) {
#pragma unroll
    for (int i = 0; i < kTile / 2; ++i) sums[i] = 0.0f;
    const uint64_t tile = wgmma_matrix(stage);
    constexpr int kAtOnce = kWaitingSteps % 4 == 0 ? 4 : 1;
#pragma unroll 1
    for (int first = 0; first < kWaitingSteps; first += kAtOnce) {
      uint32_t a[kAtOnce][4];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const uint4 bits = waiting[(first + i) * kLatentThreads];
        a[i][0] = bits.x, a[i][1] = bits.y, a[i][2] = bits.z, a[i][3] = bits.w;
      }
      wgmma_pin(sums);
      wgmma_pin(a);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) wgmma_bf16<kTile>(sums, a[i], matrix(tile, first + i));
      wgmma_commit();
      wgmma_wait<0>();
    }
    wgmma_pin(sums);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kHeldSteps; ++step) {
      wgmma_bf16<kTile>(sums, held[step], matrix(tile, kWaitingSteps + step));
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void wait() {
    wgmma_wait<0>();
    wgmma_pin(sums);
  }

  // Pass the values of every pair of tokens to use(n, low, high): tokens 8n + 2t and 8n + 2t + 1 of
  // features i (low) and i + WIDTH/2 (high), rounded. With ``tables`` of the tile they are rotated.
  template <class Use>
  __device__ __forceinline__ void finish(const float* tables, const Use& use) const {
    const int t = thread_index() % 4, i = feature();
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
      float low[2], high[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        low[j] = sums[4 * n + j] + bias[0];
        high[j] = sums[4 * n + 2 + j] + bias[1];
        if (tables != nullptr) {
          const float* at = tables + (8 * n + 2 * t + j) * kTableStride + i;
          const float cosine = at[0], sine = at[Config::kWidth / 2];
          const float first = low[j], second = high[j];
          low[j] = __fmaf_rn(first, cosine, -__fmul_rn(second, sine));
          high[j] = __fmaf_rn(second, cosine, __fmul_rn(first, sine));
        }
      }
      use(n, pack_bf16x2(low[0], low[1]), pack_bf16x2(high[0], high[1]));
      __syncwarp();  // otherwise the compiler hoists so many loads that it runs out of registers
    }
  }

 private:
  // Load 16 · kLoadSteps rows of the weight from row k_first on.
  __device__ __forceinline__ static void load_block(const uint4* w, int group, int k_first,
                                                    uint4* space) {
#pragma unroll 4
    for (int i = thread_index(); i < kLoadUnits; i += kLatentThreads) {
      const int k = i / 16, unit = i % 16, at = group * 16 + unit;
      const bool real = at < kFeatures / 8 && k_first + k < Config::kEntry;
      const int64_t row = real ? k_first + k : 0;
      cp_async_16_or_zero(space + k * 16 + (unit ^ (k % 8)),
                          w + row * (kFeatures / 8) + (real ? at : 0), real);
    }
    cp_async_commit();
    cp_async_wait<0>();
    named_barrier_sync(kKeyBarrier, kLatentThreads);
  }

  // The descriptor of step ``step`` of a tile: 32 bytes further, or in the next panel.
  __device__ __forceinline__ static uint64_t matrix(uint64_t tile, int step) {
    return tile + step / 4 * kPanelUnits + 2 * (step % 4);
  }
};

// Start to copy the rows of the rotary tables at the positions of a tile's tokens, with ``threads``
// threads. Only invisible tokens have positions past the tables.
template <int threads, class PositionOf>
__device__ __forceinline__ void fetch_tables(const uint4* cos, const uint4* sin, int positions,
                                             uint4* tables, const PositionOf& position_of) {
  constexpr int kUnits = Config::kWidth / 8;  // of a row of one table
#pragma unroll(threads == 128 ? (Config::kViewed ? 2 : 4) : 1)
  for (int i = thread_index() % threads; i < kTile * 2 * kUnits; i += threads) {
    const int token = i / (2 * kUnits), part = i % (2 * kUnits);
    const int64_t row = min(position_of(token), positions - 1);
    const uint4* source = (part < kUnits ? cos : sin) + row * kUnits + part % kUnits;
    cp_async_16(tables + token * (kTableStride / 4) + part, source);
  }
}
