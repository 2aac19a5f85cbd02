// Experts in MXFP4 as operands of the prefill GEMM.
#pragma once

#include "../../_device/mxfp4.cuh"
#include "../../_device/prefill_gemm.cuh"
#include "../../_device/ptx_load.cuh"
#include "config.cuh"

namespace mxfp4_experts {

// A lane's part of a panel: 8 codes and a scale of both blocks and both halves of the A rows.
struct ExpertRaw {
  uint32_t codes[2][2];  // [block][half]
  uint32_t scales[2][2];
};

__device__ __forceinline__ void decode_panel(const ExpertRaw& raw, uint32_t (&a)[4][4]) {
#pragma unroll
  for (int block = 0; block < 2; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // 2^(scale − 1) in both halves of the word.
      const uint32_t scale = raw.scales[block][half] * 0x00800080u + 0x3F003F00u;
      uint32_t pairs[4];
      decode_word(raw.codes[block][half], scale, pairs);
      a[2 * block][half] = pairs[0];
      a[2 * block][2 + half] = pairs[1];
      a[2 * block + 1][half] = pairs[2];
      a[2 * block + 1][2 + half] = pairs[3];
    }
  }
}

constexpr int kPackedTileBytes =
    kStepBytes * (Config::kSteps + ceil_div(Config::kSteps, kStageSteps));
constexpr int kWeightsAhead = Config::kColumns > 192 ? 2 : 4;

// A lane's position in a packed tile.
struct StepCursor {
  const unsigned char* codes;   // 8 bytes: [half]
  const unsigned char* scales;  // one byte; that of the upper mma rows is 128 bytes further
  int left;                     // steps left in this stage
  int behind;                   // steps of later stages

  __device__ __forceinline__ StepCursor() = default;
  __device__ __forceinline__ explicit StepCursor(const unsigned char* tile)
      : codes(tile + lane() * 8), behind(Config::kSteps) {
    enter_stage();
  }
  static __device__ __forceinline__ int lane() {
    return threadIdx.x % 32;
  }

  __device__ __forceinline__ void enter_stage() {
    left = Config::kSteps % kStageSteps == 0 ? kStageSteps : min(kStageSteps, behind);
    behind -= left;
    scales = codes + (lane() / 4 * 16 - lane() * 8);
    codes += kStepBytes;
  }
  __device__ __forceinline__ void advance() {
    codes += kStepBytes;
    scales += 1;
    if (--left == 0) enter_stage();
  }
};

// gate/up: a packed tile is 16 rows, 8 gates and their 8 ups; a step is a block.
struct GateUpWeights {
  static constexpr int kAhead = kWeightsAhead;
  using Raw = ExpertRaw;
  StepCursor cursor;

  GateUpWeights() = default;
  __device__ __forceinline__ GateUpWeights(const unsigned char* packed, int expert, int row_tile)
      : cursor(packed + (static_cast<size_t>(expert) * Config::kRowTiles +
                         min(row_tile, Config::kRowTiles - 1)) *
                            kPackedTileBytes) {}

  __device__ __forceinline__ void load_next(Raw& raw, int panel) {
    if (panel >= TileRing<Config>::kPanels) return;
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      if (Config::kKBlocks % 2 != 0 && 2 * panel + block >= Config::kKBlocks) {
        raw.codes[block][0] = raw.codes[block][1] = 0;
        return;
      }
      const uint2 codes = load_constant8(cursor.codes);
      raw.codes[block][0] = codes.x;
      raw.codes[block][1] = codes.y;
      raw.scales[block][0] = load_constant_byte(cursor.scales);
      raw.scales[block][1] = load_constant_byte(cursor.scales + 128);
      cursor.advance();
    }
  }

  static __device__ __forceinline__ void decode(const Raw& raw, uint32_t (&a)[4][4]) {
    decode_panel(raw, a);
  }
};

// down: two packed tiles of 8 rows each; a step is two blocks, the second in the upper mma rows.
struct DownWeights {
  static constexpr int kAhead = kWeightsAhead;
  using Raw = ExpertRaw;
  StepCursor cursor;

  DownWeights() = default;
  __device__ __forceinline__ DownWeights(const unsigned char* packed, int expert, int row_tile)
      : cursor(packed + (static_cast<size_t>(expert) * Config::kRowTiles +
                         min(row_tile, Config::kRowTiles - 1)) *
                            2 * kPackedTileBytes) {}

  __device__ __forceinline__ void load_next(Raw& raw, int panel) {
    if (panel >= TileRing<Config>::kPanels) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint2 codes = load_constant8(cursor.codes + half * kPackedTileBytes);
      const unsigned char* const scales = cursor.scales + half * kPackedTileBytes;
      raw.codes[0][half] = codes.x;
      raw.codes[1][half] = codes.y;
      raw.scales[0][half] = load_constant_byte(scales);
      raw.scales[1][half] = load_constant_byte(scales + 128);
    }
    cursor.advance();
  }

  static __device__ __forceinline__ void decode(const Raw& raw, uint32_t (&a)[4][4]) {
    decode_panel(raw, a);
  }
};

}  // namespace mxfp4_experts
