// RmsMoe over a prompt chunk, gate/up: h = activation(sorted rows · gate and up of their experts).
//
// Tensors and numbers are those of prefill.cu.
#include "../_device/prefill_store.cuh"
#include "device/config.cuh"
#include "device/prefill_experts.cuh"

struct GateUpGemm : ExpertGemm<Experts::GateUp> {
  static constexpr int kStagingValues = kPairsStride;
  const uint16_t* bias;
  unsigned char* h;

  __device__ __forceinline__ LaneBias ahead_of(const GemmTile& tile) const {
    return lane_bias<Config::kRowTiles>(
        bias + static_cast<size_t>(tile.expert) * (16 * Config::kRowTiles), tile);
  }

  // The panels of h have the 64 results of a tile in one of their own: 16-byte chunks of 8.
  template <int columns>
  __device__ __forceinline__ void store(const GemmTile& tile, LaneBias ahead,
                                        const float (&sums)[columns / 2], uint16_t* staging) const {
    const float2 b = ahead.widened();
    const auto act = [b](float gate, float up) {
      if constexpr (Config::kClamped == 0) {
        const float plain = gate + b.x;
        return __fdividef(plain, 1.0f + exp2_fast(-1.44269504f * plain)) * (up + b.y);
      } else {
        const float limit = static_cast<float>(Config::kLimit);
        const float g = fminf(gate + b.x, limit);
        const float u = fminf(fmaxf(up + b.y, -limit), limit);
        const float power = exp2_fast(-1.44269504f * static_cast<float>(Config::kAlpha) * g);
        return __fdividef(g, 1.0f + power) * (u + 1.0f);
      }
    };
    stage_pairs<columns>(sums, act, staging);
    const int panel = tile.row_tile / kConsumerWarps, group = warpgroup();
    const bool there = 2 * panel + group < Config::kRowTiles / 4;
    for_each_piece<4>(tile.live, [&](int token, int piece) {
      const uint32_t* const words =
          reinterpret_cast<const uint32_t*>(staging + token * kPairsStride);
      const uint4 chunk = panel_chunk_of([&](int i) { return words[i]; }, piece);
      *reinterpret_cast<uint4*>(
          h + panel_chunk(panel, 4 * group + piece, tile.first + token, rows_of_panels)) =
          there ? chunk : make_uint4(0, 0, 0, 0);
    });
  }
};

extern "C" __global__ void __launch_bounds__(kGemmThreads, 1)
    moe_gate_up(const unsigned char* gate_up, const uint16_t* gate_up_bias, int* workspace_tiles,
                const unsigned char* workspace_rows, unsigned char* workspace_h, int panel_rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ TileRing<Config> ring;
  GateUpGemm gemm;
  gemm.packed = gate_up;
  gemm.panel_start = workspace_rows;
  gemm.rows_of_panels = panel_rows;
  gemm.tiles = workspace_tiles;
  gemm.taken = kTakenGateUp;
  gemm.bias = gate_up_bias;
  gemm.h = workspace_h;
  prefill_gemm(gemm, ring, shared);
}
