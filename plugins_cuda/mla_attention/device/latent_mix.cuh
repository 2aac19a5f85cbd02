// Weighted sums of latents: M rows of weights in shared memory times a tile, by one warpgroup.
//
// Config: the members of latent_walk.cuh, VALUE (summed columns of an entry), Q_HEADS, PLACES (of
// the workspaces, per row and head), CONSUMER_WARPGROUPS (warpgroups of the CTA that do this for
// separate rows; with several, they are the first ones). A warp has 16 columns of every 64 and all
// rows of weights.
#pragma once

#include "../../_device/attention_softmax.cuh"
#include "../../_device/attention_tile.cuh"
#include "config.cuh"
#include "latent_walk.cuh"

constexpr int kColumnParts = Config::kValue / 16;
constexpr int kMixWarps = 4, kMixThreads = 32 * kMixWarps;
constexpr int kMixBarrier = 3;  // of the first of these warpgroups
static_assert(Config::kConsumerWarpgroups == 1 || Config::kConsumerWarpgroups == 2,
              "each has a separate barrier");
constexpr int kWarpParts = ceil_div(kColumnParts, kMixWarps);
static_assert(Config::kValue % 16 == 0, "an mma has eight columns; two share a load");

// The index of this thread in the warpgroup.
__device__ __forceinline__ int mix_thread() {
  return thread_index() % kMixThreads;
}
__device__ __forceinline__ void mix_sync() {
  // The barrier index is a constant: a variable one would reserve all barriers.
  if (Config::kConsumerWarpgroups == 1 || thread_index() < kMixThreads) {
    named_barrier_sync(kMixBarrier, kMixThreads);
  } else {
    named_barrier_sync(kMixBarrier + 1, kMixThreads);
  }
}

// The softmax state of a row of weights, for a head and a row of the launch, in one thread.
struct RowState {
  float maximum;  // of the scores, before the scale
  float sum;      // over this thread's keys

  __device__ __forceinline__ void clear() {
    maximum = no_maximum();
    sum = 0.0f;
  }
};

template <int kMTiles>
struct Mixer {
  float sums[kMTiles][kWarpParts][2][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kMTiles * kWarpParts * 8; ++i) {
      sums[i / 8 / kWarpParts][i / 8 % kWarpParts][i / 4 % 2][i % 4] = 0.0f;
    }
  }

  __device__ __forceinline__ static int part_of(int i) {
    return i * kMixWarps + mix_thread() / 32;
  }

  __device__ __forceinline__ static bool has(int i) {
    return kColumnParts % kMixWarps == 0 || part_of(i) < kColumnParts;
  }

  // sums = sums · rescale + weights · tile. ``weights`` [16 · kMTiles][kTile], ``rescale`` [16 ·
  // kMTiles].
  __device__ __forceinline__ void add(const uint4* weights, const float* rescale,
                                      const uint4* stage) {
    const int lane = thread_index() % 32, g = lane / 4;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      const float low = rescale[16 * m + g], high = rescale[16 * m + g + 8];
      // A factor of 1 changes nothing.
      if (!__any_sync(kAllLanes, low != 1.0f || high != 1.0f)) continue;
#pragma unroll
      for (int i = 0; i < kWarpParts * 2; ++i) {
        float (&own)[4] = sums[m][i / 2][i % 2];
        own[0] *= low, own[1] *= low, own[2] *= high, own[3] *= high;
      }
    }
    // Part i of a warp is in panel i, at the same offset of each.
    static_assert(kMixWarps == 4, "a panel has 16 columns per warp");
    const uint4* const own = stage + entry_unit(lane % 16, 2 * part_of(0) + lane / 16);
#pragma unroll(kMTiles* kWarpParts <= 8 ? 2 : 1)
    for (int step = 0; step < kTile / 16; ++step) {
      uint32_t a[kMTiles][4];
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        ldmatrix_x4(a[m], weights + tile_unit<kTile>(16 * m + lane % 16, 2 * step + lane / 16));
      }
#pragma unroll
      for (int i = 0; i < kWarpParts; ++i) {
        if (!has(i)) continue;
        uint32_t b[4];
        ldmatrix_x4_transposed(b, own + i * kPanelUnits + step * 16 * 8);
        const uint32_t first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
          mma_bf16(sums[m][i][0], a[m], first);
          mma_bf16(sums[m][i][1], a[m], second);
        }
      }
    }
  }

  // End a split and write its states to the workspaces. ``place_of(m)`` is the (row, head) of a row
  // of weights in them, or negative. ``state`` [16 · kMTiles] has its maximum, in units of log 2,
  // and its sum. The splits of a complete group are merged in sequence in their place; ``joined``
  // has the result of the earlier ones. ``any``: whether the split has a tile.
  template <class PlaceOf>
  __device__ __forceinline__ void end_split(int split, bool any, const float2* state,
                                            float2* joined, float2* split_sums, float* split_values,
                                            const PlaceOf& place_of) const {
    const bool is_first = !kWholeGroups || split < Config::kGroups;
    for (int row = mix_thread(); row < 16 * kMTiles && is_first; row += kMixThreads) {
      joined[row] = make_float2(no_maximum(), 0.0f);
    }
    mix_sync();
    if (any) store(place_of_split(split), state, joined, split_values, place_of);
    mix_sync();
    for (int row = mix_thread(); row < 16 * kMTiles; row += kMixThreads) {
      Part all{joined[row].x, joined[row].y, {}};
      if (any) join(all, {state[row].x, state[row].y, {}});
      joined[row] = make_float2(all.maximum, all.sum);
      const int64_t at = place_of(row);
      if (at >= 0) split_sums[at * Config::kPlaces + place_of_split(split)] = joined[row];
    }
    mix_sync();
  }

 private:
  template <class PlaceOf>
  __device__ __forceinline__ void store(int place, const float2* state, const float2* joined,
                                        float* values, const PlaceOf& place_of) const {
    const int lane = thread_index() % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = 16 * m + 8 * j + g;
        const int64_t at_row = place_of(row);
        if (at_row < 0) continue;
        float2* to = reinterpret_cast<float2*>(
            values + (at_row * Config::kPlaces + place) * Config::kValue + 2 * t);
        if (!kWholeGroups || joined[row].x == no_maximum()) {
#pragma unroll
          for (int i = 0; i < 2 * kWarpParts; ++i) {
            const float (&own)[4] = sums[m][i / 2][i % 2];
            if (has(i / 2)) {
              to[8 * part_of(i / 2) + 4 * (i % 2)] = make_float2(own[2 * j], own[2 * j + 1]);
            }
          }
        } else if (state[row].x != no_maximum()) {
          add_to(to, m, j, joined[row].x, state[row].x);
        }
      }
    }
  }

  // Merge a split's sums with earlier ones, whose maxima are given, as join() does. Several loads
  // are issued at once.
  __device__ __forceinline__ void add_to(float2* to, int m, int j, float before, float own) const {
    const float maximum = fmaxf(before, own);
    const float a = exp2_fast(before - maximum), b = exp2_fast(own - maximum);
    constexpr int kAtOnce = kWarpParts % 4 == 0 ? 4 : 1;
#pragma unroll
    for (int first = 0; first < kWarpParts; first += kAtOnce) {
      float2 held[2 * kAtOnce];
#pragma unroll
      for (int i = 0; i < 2 * kAtOnce; ++i) {
        const int part = first + i / 2;
        if (has(part)) held[i] = load_l2_float2(to + 8 * part_of(part) + 4 * (i % 2));
      }
#pragma unroll
      for (int i = 0; i < 2 * kAtOnce; ++i) {
        const int part = first + i / 2;
        const float (&mine)[4] = sums[m][part][i % 2];
        if (!has(part)) continue;
        to[8 * part_of(part) + 4 * (i % 2)] =
            make_float2(__fmaf_rn(mine[2 * j], b, __fmul_rn(held[i].x, a)),
                        __fmaf_rn(mine[2 * j + 1], b, __fmul_rn(held[i].y, a)));
      }
    }
  }
};
