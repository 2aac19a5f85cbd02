// The state of a warp's rows in a warpgroup that uses wgmma: scores of `keys` keys at a time,
// weights, and the sums of values. mma_rows.cuh describes how rows and heads share an mma.
//
// Config: WIDTH (64, 128 or 256), GROUP.
#pragma once

#include "../../_device/attention_softmax.cuh"
#include "ptx_wgmma_rows.cuh"
#include "config.cuh"
#include "prompt_rows.cuh"

constexpr int kWarpRows = Mma::kAll;
constexpr int kSteps = Config::kWidth / 16;
// With heads of 256, values occupy most registers: queries are in shared memory.
constexpr bool kHoldsQueries = Config::kWidth <= 128;
constexpr int kGroupQueries = 64;  // rows of a warpgroup's mma

// `Matrix`: a descriptor of keys or values in shared memory, which advances by units of 16 bytes.
template <int keys>
struct RowPair {
  uint32_t queries[kHoldsQueries ? kSteps : 1][4];
  uint64_t shared_queries;  // the descriptor of the warpgroup's [kGroupQueries, WIDTH]
  float score[keys / 8][4];
  uint32_t weight[keys / 16][4];
  float values[Config::kWidth / 8][4];
  float maximum[kHalves];  // of the scores, before the scale
  float sum[kHalves];      // over this lane's keys

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < Config::kWidth / 2; ++i) values[i / 4][i % 4] = 0.0f;
    maximum[0] = maximum[1] = no_maximum();
    sum[0] = sum[1] = 0.0f;
  }

  __device__ __forceinline__ float (&scores())
      [keys / 2] { return reinterpret_cast<float (&)[keys / 2]>(score); } __device__ __forceinline__
      float (&sums())
          [Config::kWidth / 2] { return reinterpret_cast<float (&)[Config::kWidth / 2]>(values); }

  // Load the queries of a warp's rows; `shared` has those of the warpgroup if it must.
  template <class AnyRow>
  __device__ __forceinline__
      void load_queries(const uint32_t* q, const AnyRow* rows, const uint4* shared) {
    if constexpr (kHoldsQueries) {
      load_query_rows(queries, q, rows);
    } else {
      shared_queries = panel_matrix<64, kGroupQueries>(shared);
    }
  }

  // Start S = Q·Kᵀ.
  template <class Matrix>
  __device__ __forceinline__ void begin_scores(Matrix matrix) {
    if constexpr (kHoldsQueries) {
      wgmma_pin(scores());
      wgmma_pin(queries);
      wgmma_fence();
      wgmma_bf16_new<keys>(scores(), queries[0], matrix);
#pragma unroll
      for (int step = 1; step < kSteps; ++step) {
        wgmma_bf16<keys>(scores(), queries[step], matrix + panel_step<keys>(step));
      }
    } else {
#pragma unroll
      for (int i = 0; i < keys / 2; ++i) score[i / 4][i % 4] = 0.0f;
      wgmma_pin(scores());
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        wgmma_bf16_shared<keys>(scores(), shared_queries + panel_step<kGroupQueries>(step),
                                matrix + panel_step<keys>(step));
      }
    }
    wgmma_commit();
  }

  // Start values += weights · V.
  template <class Matrix>
  __device__ __forceinline__ void begin_values(Matrix matrix) {
    wgmma_pin(sums());
    wgmma_pin(weight);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < keys / 16; ++step) {
      wgmma_bf16_rows<Config::kWidth>(sums(), weight[step], matrix + step * 128);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void end_values() {
    wgmma_wait<0>();
    wgmma_pin(sums());
    wgmma_pin(weight);
  }

  // Convert weights to A operands.
  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int i = 0; i < keys / 4; ++i) {
      const float (&pair)[4] = score[i / 4 * 2 + i % 4 / 2];
      weight[i / 4][i % 4] = pack_bf16x2(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
    }
  }
};
