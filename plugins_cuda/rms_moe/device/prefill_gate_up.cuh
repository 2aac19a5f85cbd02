// The epilogue of the prefill GEMM of gate/up: activated results as panels of h.
#pragma once

#include "../../_device/prefill_store.cuh"
#include "gated.cuh"
#include "prefill_experts.cuh"

template <int warps>
struct GateUpGemm : ExpertGemm<Experts::GateUp, warps> {
  static constexpr int kStagingValues = kPairsStride;
  const uint16_t* bias;
  unsigned char* h;

  __device__ __forceinline__ LaneBias ahead_of(const GemmTile& tile) const {
    return lane_bias<Config::kRowTiles>(
        bias + static_cast<size_t>(tile.expert) * (16 * Config::kRowTiles), tile);
  }

  // A panel of h has the 64 results of two warpgroups: 16-byte chunks of 8.
  template <int columns>
  __device__ __forceinline__ void store(const GemmTile& tile, LaneBias ahead,
                                        const float (&sums)[columns / 2], uint16_t* staging) const {
    const float2 b = ahead.widened();
    const auto act = [b](float gate, float up) { return gated(gate, up, b.x, b.y); };
    stage_pairs<columns>(sums, act, staging);
    constexpr int kGroups = Config::kRowTiles / 4;
    const int own = tile.row_tile / 4 + warpgroup();
    const int panel = warps == 8 ? tile.row_tile / 8 : own / 2;
    const int group = warps == 8 ? warpgroup() : own % 2;
    const bool there = 2 * panel + group < kGroups;
    if constexpr (warps != 8) {
      // Tiles can end inside a panel: the last warpgroup then fills the panel with zeros.
      if (own >= kGroups) return;
      if (kGroups % 2 != 0 && own == kGroups - 1) {
        for_each_piece<4>(tile.live, [&](int token, int piece) {
          *reinterpret_cast<uint4*>(h + panel_chunk(panel, 4 + piece, tile.first + token,
                                                    this->rows_of_panels)) = make_uint4(0, 0, 0, 0);
        });
      }
    }
    for_each_piece<4>(tile.live, [&](int token, int piece) {
      const uint32_t* const words =
          reinterpret_cast<const uint32_t*>(staging + token * kPairsStride);
      const uint4 chunk = panel_chunk_of([&](int i) { return words[i]; }, piece);
      *reinterpret_cast<uint4*>(
          h + panel_chunk(panel, 4 * group + piece, tile.first + token, this->rows_of_panels)) =
          there ? chunk : make_uint4(0, 0, 0, 0);
    });
  }
};

template <int warps>
__device__ __forceinline__ GateUpGemm<warps> gate_up_gemm(const unsigned char* gate_up,
                                                          const uint16_t* bias, int* tiles,
                                                          const unsigned char* rows,
                                                          unsigned char* h, int panel_rows) {
  GateUpGemm<warps> gemm;
  gemm.packed = gate_up;
  gemm.panel_start = rows;
  gemm.rows_of_panels = panel_rows;
  gemm.tiles = tiles;
  gemm.taken = kTakenGateUp;
  gemm.bias = bias;
  gemm.h = h;
  return gemm;
}
