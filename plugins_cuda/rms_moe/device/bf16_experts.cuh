// Experts in bf16 as operands of the prefill GEMM.
#pragma once

#include "../../_device/prefill_gemm.cuh"
#include "../../_device/ptx_load.cuh"
#include "config.cuh"

namespace bf16_experts {

constexpr int kHalfStepBytes = 512, kBf16StepBytes = 2 * kHalfStepBytes;
constexpr int kPackedTileBytes = kBf16StepBytes * Config::kSteps;
constexpr int kWeightsAhead = Config::kColumns > 128 ? 2 : 4;

// A lane's part of a panel: 8 values of both blocks and both halves of the A rows.
struct ExpertRaw {
  uint4 values[2][2];  // [block][half]
};

__device__ __forceinline__ void decode_panel(const ExpertRaw& raw, uint32_t (&a)[4][4]) {
#pragma unroll
  for (int block = 0; block < 2; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4& values = raw.values[block][half];
      a[2 * block][half] = values.x;
      a[2 * block][2 + half] = values.y;
      a[2 * block + 1][half] = values.z;
      a[2 * block + 1][2 + half] = values.w;
    }
  }
}

// Return this lane's position in the packed tile ``tile``.
__device__ __forceinline__ const unsigned char* lane_of_tile(const unsigned char* packed,
                                                             size_t tile) {
  return packed + tile * kPackedTileBytes + threadIdx.x % 32 * 16;
}

// gate/up: a packed tile is 16 rows, 8 gates and their 8 ups; a step is a block.
struct GateUpWeights {
  static constexpr int kAhead = kWeightsAhead;
  using Raw = ExpertRaw;
  const unsigned char* at;

  GateUpWeights() = default;
  __device__ __forceinline__ GateUpWeights(const unsigned char* packed, int expert, int row_tile)
      : at(lane_of_tile(packed, static_cast<size_t>(expert) * Config::kRowTiles +
                                    min(row_tile, Config::kRowTiles - 1))) {}

  __device__ __forceinline__ void load_next(Raw& raw, int panel) {
    if (panel >= TileRing<Config>::kPanels) return;
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const bool there = Config::kKBlocks % 2 == 0 || 2 * panel + block < Config::kKBlocks;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        raw.values[block][half] =
            there ? load_constant16(at + block * kBf16StepBytes + half * kHalfStepBytes)
                  : make_uint4(0, 0, 0, 0);
      }
    }
    at += 2 * kBf16StepBytes;
  }

  static __device__ __forceinline__ void decode(const Raw& raw, uint32_t (&a)[4][4]) {
    decode_panel(raw, a);
  }
};

// down: two packed tiles of 8 rows each; a step is two blocks, the second in the upper mma rows.
struct DownWeights {
  static constexpr int kAhead = kWeightsAhead;
  using Raw = ExpertRaw;
  const unsigned char* at;

  DownWeights() = default;
  __device__ __forceinline__ DownWeights(const unsigned char* packed, int expert, int row_tile)
      : at(lane_of_tile(packed, 2 * (static_cast<size_t>(expert) * Config::kRowTiles +
                                     min(row_tile, Config::kRowTiles - 1)))) {}

  __device__ __forceinline__ void load_next(Raw& raw, int panel) {
    if (panel >= TileRing<Config>::kPanels) return;
#pragma unroll
    for (int block = 0; block < 2; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        raw.values[block][half] =
            load_constant16(at + half * kPackedTileBytes + block * kHalfStepBytes);
      }
    }
    at += kBf16StepBytes;
  }

  static __device__ __forceinline__ void decode(const Raw& raw, uint32_t (&a)[4][4]) {
    decode_panel(raw, a);
  }
};

}  // namespace bf16_experts
