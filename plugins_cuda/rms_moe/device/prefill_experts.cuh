// Grouped operands of the prefill GEMM: experts as they are stored, and tiles of rows sorted by
// expert.
//
// For 2048 rows of GPT-OSS-20B, top 4 of 32: 8192 sorted rows in about 50 tiles of up to 256.
// gate/up has 272 GFLOP, 283 MB of weights, 47 MB in and 47 MB out; down 136 GFLOP, 141 MB, 47 and
// 47. A panel of 128 × 256 needs 4.25 KB of codes and scales and 32 KB of rows, mostly from L2. A
// warp decodes in about 120 of the 1024 cycles that the tensor cores need. At 600 TFLOP/s: 450 and
// 225 µs.
//
// Config: those of prefill_gemm.cuh, kSteps, kMaxTiles, kWeights.
#pragma once

#include "bf16_experts.cuh"
#include "coded_experts.cuh"
#include "config.cuh"
#include "mxfp4_experts.cuh"
#include "prefill_tiles.cuh"

// How experts are stored: the code of a storage (linear/storage.py) is 0 for bf16 and 2 for MXFP4.
template <int weights>
struct StoredExperts {
  using GateUp = coded_experts::GateUpWeights;
  using Down = coded_experts::DownWeights;
};
template <>
struct StoredExperts<0> {
  using GateUp = bf16_experts::GateUpWeights;
  using Down = bf16_experts::DownWeights;
};
template <>
struct StoredExperts<2> {
  using GateUp = mxfp4_experts::GateUpWeights;
  using Down = mxfp4_experts::DownWeights;
};
using Experts = StoredExperts<Config::kWeights>;

// The common part of grouped GEMMs. Free CTAs take the next tile, weight rows fastest, so that
// concurrent ones read few rows and few experts.
template <class ExpertWeights, int warps>
struct ExpertGemm {
  using Weights = ExpertWeights;
  static constexpr bool kAnyColumns = true;
  static constexpr int kRowTiles = ceil_div(Config::kRowTiles, warps);
  const unsigned char* packed;
  const unsigned char* panel_start;
  int rows_of_panels;
  int* tiles;
  int taken;  // which counter

  __device__ __forceinline__ const unsigned char* panels() const {
    return panel_start;
  }
  __device__ __forceinline__ int panel_rows() const {
    return rows_of_panels;
  }
  // A tile as the sort wrote it; beyond the last one it is undefined and not used.
  struct Lookup {
    int id, count;
    uint4 tokens;
  };
  __device__ __forceinline__ int first() const {
    return atomicAdd(tiles + taken, 1);
  }
  __device__ __forceinline__ int next(const GemmTile&) const {
    return first();
  }
  __device__ __forceinline__ Lookup lookup(int id) const {
    const int place = min(id / kRowTiles, Config::kMaxTiles - 1);
    return {id, load_l2_int(tiles + kTokenTiles), load_l2_16(tiles + kTilesHeader + 4 * place)};
  }
  __device__ __forceinline__ GemmTile tile(const Lookup& entry) const {
    if (entry.id / kRowTiles >= entry.count) return no_tile();
    const int live = static_cast<int>(entry.tokens.z);
    return {entry.id % kRowTiles * warps, static_cast<int>(entry.tokens.x),
            static_cast<int>(entry.tokens.y), round_up(live, 16), live};
  }
  __device__ __forceinline__ Weights weights(const GemmTile& tile, int row_tile) const {
    return {packed, tile.expert, row_tile};
  }
};
