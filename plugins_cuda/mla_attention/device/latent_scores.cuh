// Scores of rebuilt keys and their softmax, in the attending warpgroup.
//
// Config: the members of latent_keys.cuh and latent_mix.cuh, GROUP, SCALE.
#pragma once

#include "config.cuh"
#include "latent_keys.cuh"
#include "latent_mix.cuh"

constexpr int kHeads = 8;  // of a KV head; the first GROUP are used
constexpr int kMTiles = Config::kRows * kCtaHeads * kHeads / 16;
constexpr int kStates = 16 * kMTiles;
constexpr int kBlocks = kTile / 32;  // of 8 tokens, of a warp
constexpr int kWarpStates = kCtaHeads * 2 * kHeads;
// Whether queries remain in registers between tiles.
constexpr bool kHoldsQueries = Config::kValue <= 512;
constexpr float kScale = static_cast<float>(Config::kScale) * kLog2E;
static_assert(Config::kGroup <= kHeads && Config::kScale > 0,
              "one mma holds two rows of a KV head's heads");

// One arrival per warp, after all of its lanes.
__device__ __forceinline__ void arrive(Mbarrier* barrier) {
  __syncwarp();
  if (thread_index() % 32 == 0) mbarrier_arrive(barrier);
}

// The weights of a warp's tokens: lane 4·g + t has head g of row j, tokens 8n + 2t, + 1.
struct Softmax {
  const uint32_t* queries;
  int first_row, rows_held;
  uint32_t query[kCtaHeads][kHeadTiles][2 * Config::kRows];
  float score[kCtaHeads][kBlocks][4];
  RowState state[kCtaHeads][Config::kRows];

  __device__ __forceinline__ static int warp() {
    return mix_thread() / 32;
  }
  // The row of weights of a head and a row.
  __device__ __forceinline__ static int row_of(int head, int j) {
    return (j * kCtaHeads + head) * kHeads + thread_index() % 32 / 4;
  }

  // Open ``count`` rows from row ``first`` of the launch.
  __device__ __forceinline__ void open(const uint32_t* q, int first, int count) {
    queries = q;
    first_row = first;
    rows_held = count;
    if (kHoldsQueries) load();
  }

  // Load the queries as A operands; with one row half of each is empty.
  __device__ __forceinline__ void load() {
    const int g = thread_index() % 32 / 4, t = thread_index() % 4;
#pragma unroll
    for (int i = 0; i < kCtaHeads * Config::kRows; ++i) {
      const int head = i / Config::kRows, j = i % Config::kRows,
                kv_head = blockIdx.y * kCtaHeads + head;
      const bool real = g < Config::kGroup && kv_head < Config::kKvHeads;
      const int64_t row = first_row + min(j, rows_held - 1);
      const uint32_t* from =
          queries +
          ((row * Config::kKvHeads + kv_head) * Config::kGroup + g) * (Config::kWidth / 2) + t;
#pragma unroll
      for (int tile = 0; tile < kHeadTiles; ++tile) {
        query[head][tile][j] = real ? from[4 * tile] : 0u;
        query[head][tile][j + Config::kRows] = real ? from[4 * tile + Config::kWidth / 4] : 0u;
      }
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kCtaHeads * Config::kRows; ++i)
      state[i / Config::kRows][i % Config::kRows].clear();
  }

  // Compute S = Q·Kᵀ of a tile's keys without invisible ones, and write each row's maximum to
  // ``maxima``. ``keys()`` waits for the keys, ``used_up()`` releases them.
  template <class Keys, class UsedUp>
  __device__ __forceinline__ void take_scores(const Keys& keys, const UsedUp& used_up,
                                              float* maxima, const LatentRows& rows,
                                              const TileCursor& at) {
    const int lane = thread_index() % 32, t = lane % 4, block = warp() * kBlocks;
    if (!kHoldsQueries) load();
    bool listed[2 * kBlocks];
#pragma unroll
    for (int i = 0; i < 2 * kBlocks && Config::kListed; ++i) {
      listed[i] = rows.listed_slot(at.tile * kTile + (block + i / 2) * 8 + 2 * t + i % 2) >= 0;
    }
    const uint2* const of_tile = keys();
#pragma unroll
    for (int head = 0; head < kCtaHeads; ++head) {
      const uint2* of_head = of_tile + head * (kTile / 8) * kHeadTiles * 32;
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        float (&own)[4] = score[head][n];
        own[0] = own[1] = own[2] = own[3] = 0.0f;
#pragma unroll
        for (int tile = 0; tile < kHeadTiles; ++tile) {
          const uint2 pair = of_head[((block + n) * kHeadTiles + tile) * 32 + lane];
          const uint32_t b[2] = {pair.x, pair.y};
          const uint32_t (&q)[2 * Config::kRows] = query[head][tile];
          const uint32_t a[4] = {q[0], Config::kRows > 1 ? q[1] : 0u, q[Config::kRows],
                                 Config::kRows > 1 ? q[Config::kRows + 1] : 0u};
          mma_bf16(own, a, b);
        }
      }
    }
    used_up();
#pragma unroll
    for (int head = 0; head < kCtaHeads; ++head) {
#pragma unroll
      for (int j = 0; j < Config::kRows; ++j) {
        const Span span = rows.span(j, at.owner);
        float top = no_maximum();
#pragma unroll
        for (int i = 0; i < 2 * kBlocks; ++i) {
          float& mine = score[head][i / 2][2 * j + i % 2];
          const int place = at.tile * kTile + (block + i / 2) * 8 + 2 * t + i % 2;
          if (Config::kListed ? !listed[i] : !span.holds(place)) mine = no_maximum();
          top = fmaxf(top, mine);
        }
        top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
        top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
        if (t == 0) maxima[warp() * kWarpStates + (head * 2 + j) * kHeads + lane / 4] = top;
      }
    }
  }

  // Compute weights relative to the maximum of all four warps' scores, and the factors of the sums
  // so far.
  __device__ __forceinline__ void take_weights(uint4* weights, float* rescale,
                                               const float* maxima) {
    const int lane = thread_index() % 32, g = lane / 4, t = lane % 4, block = warp() * kBlocks;
#pragma unroll
    for (int head = 0; head < kCtaHeads; ++head) {
#pragma unroll
      for (int j = 0; j < Config::kRows; ++j) {
        RowState& own = state[head][j];
        float top = own.maximum;
#pragma unroll
        for (int other = 0; other < kMixWarps; ++other) {
          top = fmaxf(top, maxima[other * kWarpStates + (head * 2 + j) * kHeads + g]);
        }
        const float base = finite_maximum(top), shift = -__fmul_rn(base, kScale);
        const float factor = exp2_fast(__fmul_rn(own.maximum - base, kScale));
        own.maximum = top;
        float added = 0.0f;
        unsigned char* to = reinterpret_cast<unsigned char*>(weights) + 4 * t;
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
          const float low = exp2_fast(__fmaf_rn(score[head][n][2 * j], kScale, shift));
          const float high = exp2_fast(__fmaf_rn(score[head][n][2 * j + 1], kScale, shift));
          added += low + high;
          *reinterpret_cast<uint32_t*>(to + 16 * tile_unit<kTile>(row_of(head, j), block + n)) =
              pack_bf16x2(low, high);
        }
        own.sum = __fmaf_rn(own.sum, factor, added);
        if (t == 0 && warp() == 0) rescale[row_of(head, j)] = factor;
      }
    }
  }

  // Exchange the rows' maxima and sums over a split, through ``maxima``.
  __device__ __forceinline__ void publish(float2* split_state, float* maxima) const {
    const int lane = thread_index() % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < kCtaHeads * Config::kRows; ++i) {
      float sum = state[i / Config::kRows][i % Config::kRows].sum;
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      if (t == 0)
        maxima[warp() * kWarpStates + (i / Config::kRows * 2 + i % Config::kRows) * kHeads + g] =
            sum;
    }
    mix_sync();
    if (warp() == 0 && t == 0) {
#pragma unroll
      for (int i = 0; i < kCtaHeads * Config::kRows; ++i) {
        const float* from = maxima + (i / Config::kRows * 2 + i % Config::kRows) * kHeads + g;
        float sum = 0.0f;
#pragma unroll
        for (int other = 0; other < kMixWarps; ++other) sum += from[other * kWarpStates];
        split_state[row_of(i / Config::kRows, i % Config::kRows)] = make_float2(
            __fmul_rn(state[i / Config::kRows][i % Config::kRows].maximum, kScale), sum);
      }
    }
    mix_sync();
  }
};
