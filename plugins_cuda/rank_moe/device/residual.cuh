// Common parts of RankMoe's exchanges in decoding and prefill: the residual, and live rows.
//
// Config: kWidth, kTopK (experts of a row, including shared ones), kSequences, kRanks, kWords, and
// the members that _device/rank_rounds.cuh needs.
#pragma once

#include "../../_device/bf16.cuh"
#include "../../_device/l2_word.cuh"
#include "../../_device/rank_rounds.cuh"
#include "config.cuh"

using Exchange = RankExchange<Config::kRanks, Config::kWords>;

constexpr int kRowPairs = Config::kWidth / 2, kTopK = Config::kTopK;

// ``x`` [rows, WIDTH] and the result, as pairs. Rows from ``live`` on are padding.
struct Residual {
  using Ahead = uint32_t;
  const int* x;
  uint32_t* y;
  int live;

  __device__ __forceinline__ bool is_live(int64_t pair) const {
    return pair < static_cast<int64_t>(live) * kRowPairs;
  }
  __device__ __forceinline__ Ahead ahead(int64_t pair, int) const {
    return static_cast<uint32_t>(load_l2_int(x + pair));
  }
  __device__ __forceinline__ void end(int64_t pair, Ahead residual, float2 sum) const {
    if (!is_live(pair)) return;
    const float2 r = unpack_bf16x2(residual), s = unpack_bf16x2(pack_bf16x2(sum.x, sum.y));
    y[pair] = pack_bf16x2(r.x + s.x, r.y + s.y);
  }
};
