// Experts in units of quantized values (stored_weights.cuh) as operands of the prefill GEMM.
#pragma once

#include "../../_device/prefill_gemm.cuh"
#include "../../_device/ptx_load.cuh"
#include "../../_device/stored_weights.cuh"
#include "config.cuh"

namespace coded_experts {

using Units = typename WeightUnits<Config::kWeights>::Units;
constexpr int kUnitSteps = 2;
constexpr int kPackedTileBytes = ceil_div(Config::kSteps, kUnitSteps) * Units::kBytes;

// This lane's place in the packed tile ``tile``.
__device__ __forceinline__ const unsigned char* lane_of_tile(const unsigned char* packed,
                                                             size_t tile) {
  return packed + tile * kPackedTileBytes + threadIdx.x % 32 * 16;
}

__device__ __forceinline__ void load_unit(typename Units::Held& held, const unsigned char* unit) {
#pragma unroll
  for (int piece = 0; piece < Units::kLoads; ++piece) {
    held.pieces[piece] = load_constant16(unit + piece * kLoadBytes);
  }
  load_scales<Units>(held, unit, [](const void* of) { return load_constant4(of); });
}

// gate/up: a packed tile is 16 rows, 8 gates and their 8 ups; a unit is a panel.
struct GateUpWeights {
  static constexpr int kAhead = Config::kColumns > 128 ? 2 : 4;
  using Raw = typename Units::Held;
  const unsigned char* at;

  GateUpWeights() = default;
  __device__ __forceinline__ GateUpWeights(const unsigned char* packed, int expert, int row_tile)
      : at(lane_of_tile(packed, static_cast<size_t>(expert) * Config::kRowTiles +
                                    min(row_tile, Config::kRowTiles - 1))) {}

  __device__ __forceinline__ void load_next(Raw& raw, int panel) {
    if (panel < TileRing<Config>::kPanels) load_unit(raw, at + panel * Units::kBytes);
  }

  static __device__ __forceinline__ void decode(const Raw& raw, uint32_t (&a)[4][4]) {
    Units::template decode<0>(raw, a[0], a[1]);
    Units::template decode<1>(raw, a[2], a[3]);
  }
};

// down: two packed tiles of 8 rows each; a step of a unit is a panel, its odd block in the upper
// mma rows. A unit is loaded for each of its two panels, the second time from a cache.
struct DownWeights {
  static constexpr int kAhead = 2;
  struct Raw {
    typename Units::Held tiles[2];
    bool odd;
  };
  const unsigned char* at;

  DownWeights() = default;
  __device__ __forceinline__ DownWeights(const unsigned char* packed, int expert, int row_tile)
      : at(lane_of_tile(packed, 2 * (static_cast<size_t>(expert) * Config::kRowTiles +
                                     min(row_tile, Config::kRowTiles - 1)))) {}

  __device__ __forceinline__ void load_next(Raw& raw, int panel) {
    if (panel >= TileRing<Config>::kPanels) return;
    const unsigned char* const unit = at + panel / kUnitSteps * Units::kBytes;
    raw.odd = panel % kUnitSteps != 0;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) load_unit(raw.tiles[tile], unit + tile * kPackedTileBytes);
  }

  // The compiler knows which panels are odd, since they alternate.
  static __device__ __forceinline__ void decode(const Raw& raw, uint32_t (&a)[4][4]) {
    raw.odd ? decode_step<1>(raw, a) : decode_step<0>(raw, a);
  }
  template <int step>
  static __device__ __forceinline__ void decode_step(const Raw& raw, uint32_t (&a)[4][4]) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      uint32_t first[4], second[4];
      Units::template decode<step>(raw.tiles[tile], first, second);
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        a[2 * block][tile] = first[block];
        a[2 * block][2 + tile] = first[2 + block];
        a[2 * block + 1][tile] = second[block];
        a[2 * block + 1][2 + tile] = second[2 + block];
      }
    }
  }
};

}  // namespace coded_experts
