// The softmax states of a decode warp's rows, in registers.
//
// Config: GROUP, WIDTH, CODES, SCALE, ROWS, and the members of attention_walk.cuh.
#pragma once

#include "../../_device/attention_softmax.cuh"
#include "attention_walk.cuh"
#include "config.cuh"

constexpr int kSides = Config::kRows <= Mma::kOfHalf ? 1 : kHalves;  // of each m16 tile
constexpr int kSteps = Config::kWidth / 16;
constexpr float kScale = static_cast<float>(Config::kScale) * kLog2E;
static_assert(Config::kScale > 0, "scaling preserves the maximum");

// Rows of a tile that a lane addresses: 16 keys each, as operands of scores and of sums.
struct Places {
  int key[2], value[2];

  __device__ __forceinline__ static Places in_order() {
    return {{key_row(), 16 + key_row()}, {value_row(), 16 + value_row()}};
  }

  // Lane i has the row of key i.
  __device__ __forceinline__ static Places picked(int row) {
    return {
        {__shfl_sync(kAllLanes, row, key_row()), __shfl_sync(kAllLanes, row, 16 + key_row())},
        {__shfl_sync(kAllLanes, row, value_row()), __shfl_sync(kAllLanes, row, 16 + value_row())}};
  }
};

// The queries as A operands of 16 rows × 16 columns. Those of a CTA's only row are in registers,
// others in shared memory as [ROW_WARPS][kPairs][16][WIDTH].
struct Queries {
  uint32_t held[kRows == 1 ? kSteps : 1][4];
  const uint4* tile;  // of this warp's rows

  __device__ __forceinline__ void hold(const uint32_t* from, bool real) {
#pragma unroll
    for (int step = 0; step < kSteps && kRows == 1; ++step) {
      held[step][0] = real ? query_operand(from[query_step(step, 0)]) : 0u;
      held[step][1] = held[step][3] = 0u;
      held[step][2] = real ? query_operand(from[query_step(step, 1)]) : 0u;
    }
  }

  __device__ __forceinline__ void get(uint32_t (&a)[4], int m, int step) const {
    const int lane = threadIdx.x % 32;
    if (kRows == 1) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = held[kRows == 1 ? step : 0][i];
    } else {
      ldmatrix_x4(a, tile + tile_unit<Config::kWidth>(16 * m + lane % 16, 2 * step + lane / 16));
    }
  }
};

// The softmax states of a warp's rows. Lane 4·g + t has place g of half j of tile m, and the
// columns of cache_tile.cuh.
struct States {
  float values[kPairs][2 * kSteps][4];
  float maximum[kPairs][kSides];  // of the scores, before the scale
  float sum[kPairs][kSides];      // over this lane's keys

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < kPairs; ++m) {
#pragma unroll
      for (int i = 0; i < 8 * kSteps; ++i) values[m][i / 4][i % 4] = 0.0f;
#pragma unroll
      for (int j = 0; j < kSides; ++j) maximum[m][j] = no_maximum(), sum[m][j] = 0.0f;
    }
  }

  // Convert the scores of 32 keys to weights.
  __device__ __forceinline__ void weigh(int m, int j, float (&score)[4][4]) {
    const float rescale = weigh_tile(score, j, kScale, maximum[m][j], sum[m][j]);
#pragma unroll
    for (int n = 0; n < 2 * kSteps; ++n) {
      values[m][n][2 * j] *= rescale;
      values[m][n][2 * j + 1] *= rescale;
    }
  }

  // S = Q·Kᵀ.
  __device__ __forceinline__ static void take_scores(float (&score)[kPairs][4][4],
                                                     const uint4* keys, const Places& places,
                                                     const Queries& queries) {
#pragma unroll(kIsCrowded ? 1 : kSteps)
    for (int step = 0; step < kSteps; ++step) {
      uint32_t q[kPairs][4];
#pragma unroll
      for (int m = 0; m < kPairs; ++m) queries.get(q[m], m, step);
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        uint32_t low[2], high[2];
        load_key_columns_at<Config::kWidth>(low, high, keys, places.key[part], step);
#pragma unroll
        for (int m = 0; m < kPairs; ++m) {
          multiply(score[m][2 * part], q[m], low);
          multiply(score[m][2 * part + 1], q[m], high);
        }
      }
    }
  }

  // The same for quantized keys.
  __device__ __forceinline__ static void take_scores_of_codes(float (&score)[kPairs][4][4],
                                                              const uint4* keys,
                                                              const Places& places,
                                                              const Queries& queries) {
#pragma unroll(kIsCrowded ? 1 : kSteps / 2)
    for (int pair = 0; pair < kSteps / 2; ++pair) {
      uint32_t first[2][2], second[2][2];  // [of keys][step]
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        load_key_codes(first[part], second[part], keys, places.key[part], pair);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t q[kPairs][4];
#pragma unroll
        for (int m = 0; m < kPairs; ++m) queries.get(q[m], m, 2 * pair + i);
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          uint32_t low[2], high[2];
          key_operand(low, first[part][i]);
          key_operand(high, second[part][i]);
#pragma unroll
          for (int m = 0; m < kPairs; ++m) {
            multiply(score[m][2 * part], q[m], low);
            multiply(score[m][2 * part + 1], q[m], high);
          }
        }
      }
    }
  }

  // values += weights · V
  __device__ __forceinline__ void add_values(const uint32_t (&weight)[kPairs][2][4],
                                             const uint4* tile, const Places& places) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t low[2], high[2];
        load_value_columns_at<Config::kWidth>(low, high, tile, places.value[part], step);
#pragma unroll
        for (int m = 0; m < kPairs; ++m) {
          multiply(values[m][2 * step], weight[m][part], low);
          multiply(values[m][2 * step + 1], weight[m][part], high);
        }
      }
    }
  }

  // The same for quantized values.
  __device__ __forceinline__ void add_codes(const uint32_t (&weight)[kPairs][2][4],
                                            const uint4* tile, const Places& places) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int pair = 0; pair < kSteps / 2; ++pair) {
        uint32_t codes[2][2];
        load_value_codes(codes, tile, places.value[part], pair);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t even[2], odd[2];
          value_operands(even, odd, codes[i]);
#pragma unroll
          for (int m = 0; m < kPairs; ++m) {
            multiply(values[m][4 * pair + 2 * i], weight[m][part], even);
            multiply(values[m][4 * pair + 2 * i + 1], weight[m][part], odd);
          }
        }
      }
    }
  }

  // S = Q·Kᵀ, then the weights as A operands.
  template <class SpanOf>
  __device__ __forceinline__ void take_weights(uint32_t (&weight)[kPairs][2][4], const uint4* keys,
                                               const Places& places, const Queries& queries,
                                               int from, bool full, const SpanOf& span_of) {
    float score[kPairs][4][4] = {};
    if constexpr (Config::kCodes) {
      take_scores_of_codes(score, keys, places, queries);
    } else {
      take_scores(score, keys, places, queries);
    }
    if (!full) {
#pragma unroll
      for (int half = 0; half < ceil_div(Config::kRows, Mma::kOfHalf); ++half) {
        const Span span = span_of(Mma::row(half));
        const int key = from + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int position = key + i / 2 * 8 + i % 2;
          float& mine = score[half / 2][i / 2][half % 2 * 2 + i % 2];
          if (position < span.first || position > span.last) mine = no_maximum();
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kPairs; ++m) {
#pragma unroll
      for (int j = 0; j < kSides; ++j) weigh(m, j, score[m]);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float (&pair)[4] = score[m][i / 4 * 2 + i % 4 / 2];
        const int j = i % 2;
        weight[m][i / 4][i % 4] = j < kSides ? pack_weights(pair[2 * j], pair[2 * j + 1]) : 0u;
      }
    }
  }

  // Attend to the keys of positions from … from + 31, for all rows. `span` returns the visible
  // positions of a row. It is not called if all of them are visible to all rows (`full`).
  template <class SpanOf>
  __device__ __forceinline__ void attend(const uint4* keys, const uint4* values_tile,
                                         const Places& places, const Queries& queries, int from,
                                         bool full, const SpanOf& span_of) {
    uint32_t weight[kPairs][2][4];
    take_weights(weight, keys, places, queries, from, full, span_of);
    if constexpr (Config::kCodes) {
      add_codes(weight, values_tile, places);
    } else {
      add_values(weight, values_tile, places);
    }
  }
};
