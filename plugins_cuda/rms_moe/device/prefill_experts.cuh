// Grouped operands of the prefill GEMM: experts in MXFP4 or bf16, and tiles of rows sorted by
// expert.
//
// Numbers for 2048 rows of GPT-OSS-20B, top 4 of 32: 8192 sorted rows in about 50 tiles of up to
// 256. gate/up 272 GFLOP, 283 MB of weights, 47 MB in and 47 MB out; down 136 GFLOP, 141 MB, 47
// and 47. A panel of 128 × 256 needs 4.25 KB of codes and scales and 32 KB of rows, both from L2
// mostly; decoding takes a warp about 120 of the 1024 cycles that the tensor cores need. At 600
// TFLOP/s: 450 and 225 µs.
//
// Compile-time constants: those of prefill_gemm.cuh, STEPS (of a packed tile, 16 mma rows × 32
// columns each), MOST_TILES (of tokens, whatever the routing), BF16 (how experts are stored).
#pragma once

#include "../../_device/mxfp4.cuh"
#include "../../_device/prefill_gemm.cuh"
#include "prefill_tiles.cuh"
#include "../../_device/ptx_load.cuh"

#if BF16

constexpr int kHalfStepBytes = 512, kBf16StepBytes = 2 * kHalfStepBytes;
constexpr int kPackedTileBytes = kBf16StepBytes * STEPS;
constexpr int kWeightsAhead = COLUMNS > 128 ? 2 : 4;

// What a lane needs of a panel: of both blocks and both halves of the A rows, 8 values.
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

// This lane's place in the packed tile ``tile``.
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
      : at(lane_of_tile(packed,
                        static_cast<size_t>(expert) * ROW_TILES + min(row_tile, ROW_TILES - 1))) {}

  __device__ __forceinline__ void load_next(Raw& raw, int panel) {
    if (panel >= kPanels) return;
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const bool there = K_BLOCKS % 2 == 0 || 2 * panel + block < K_BLOCKS;
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

// down: two packed tiles of 8 rows each; a step is two blocks, the second in its upper mma rows.
struct DownWeights {
  static constexpr int kAhead = kWeightsAhead;
  using Raw = ExpertRaw;
  const unsigned char* at;

  DownWeights() = default;
  __device__ __forceinline__ DownWeights(const unsigned char* packed, int expert, int row_tile)
      : at(lane_of_tile(
            packed, 2 * (static_cast<size_t>(expert) * ROW_TILES + min(row_tile, ROW_TILES - 1)))) {
  }

  __device__ __forceinline__ void load_next(Raw& raw, int panel) {
    if (panel >= kPanels) return;
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

#else

// What a lane needs of a panel: of both blocks and both halves of the A rows, 8 codes and a scale.
struct ExpertRaw {
  uint32_t codes[2][2];  // [block][half]
  uint32_t scales[2][2];
};

__device__ __forceinline__ void decode_panel(const ExpertRaw& raw, uint32_t (&a)[4][4]) {
#pragma unroll
  for (int block = 0; block < 2; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // 2^(scale − 1) in both halves, of a scale alone.
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

constexpr int kPackedTileBytes = kStepBytes * (STEPS + ceil_div(STEPS, kStageSteps));
constexpr int kWeightsAhead = COLUMNS > 192 ? 2 : 4;

// A lane's place in a packed tile, step after step.
struct StepCursor {
  const unsigned char* codes;   // 8 bytes: [half]
  const unsigned char* scales;  // one byte, and one for the upper mma rows 128 bytes on
  int left;                     // steps of this stage
  int behind;                   // steps of the stages behind it

  __device__ __forceinline__ StepCursor() = default;
  __device__ __forceinline__ explicit StepCursor(const unsigned char* tile)
      : codes(tile + lane() * 8), behind(STEPS) {
    enter_stage();
  }
  static __device__ __forceinline__ int lane() {
    return threadIdx.x % 32;
  }

  __device__ __forceinline__ void enter_stage() {
    left = STEPS % kStageSteps == 0 ? kStageSteps : min(kStageSteps, behind);
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
      : cursor(packed + (static_cast<size_t>(expert) * ROW_TILES + min(row_tile, ROW_TILES - 1)) *
                            kPackedTileBytes) {}

  __device__ __forceinline__ void load_next(Raw& raw, int panel) {
    if (panel >= kPanels) return;
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      if (K_BLOCKS % 2 != 0 && 2 * panel + block >= K_BLOCKS) {
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

// down: two packed tiles of 8 rows each; a step is two blocks, the second in its upper mma rows.
struct DownWeights {
  static constexpr int kAhead = kWeightsAhead;
  using Raw = ExpertRaw;
  StepCursor cursor;

  DownWeights() = default;
  __device__ __forceinline__ DownWeights(const unsigned char* packed, int expert, int row_tile)
      : cursor(packed + (static_cast<size_t>(expert) * ROW_TILES + min(row_tile, ROW_TILES - 1)) *
                            2 * kPackedTileBytes) {}

  __device__ __forceinline__ void load_next(Raw& raw, int panel) {
    if (panel >= kPanels) return;
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

#endif

// What grouped GEMMs share: CTAs take the next tile when they are free, weight rows fastest, so
// that those under way at a time read few rows and few experts.
template <class ExpertWeights>
struct ExpertGemm {
  using Weights = ExpertWeights;
  static constexpr bool kAnyColumns = true;
  static constexpr int kRowTiles = ceil_div(ROW_TILES, kConsumerWarps);
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
  // A tile as the sort wrote it; beyond the last it is any, and not used.
  struct Found {
    int id, count;
    uint4 tokens;
  };
  __device__ __forceinline__ int first() const {
    return atomicAdd(tiles + taken, 1);
  }
  __device__ __forceinline__ int next(const GemmTile&) const {
    return first();
  }
  __device__ __forceinline__ Found found(int id) const {
    const int place = min(id / kRowTiles, MOST_TILES - 1);
    return {id, load_l2_int(tiles + kTokenTiles), load_l2_16(tiles + kTilesHeader + 4 * place)};
  }
  __device__ __forceinline__ GemmTile tile(const Found& found) const {
    if (found.id / kRowTiles >= found.count) return no_tile();
    const int live = static_cast<int>(found.tokens.z);
    return {found.id % kRowTiles * kConsumerWarps, static_cast<int>(found.tokens.x),
            static_cast<int>(found.tokens.y), round_up(live, 16), live};
  }
  __device__ __forceinline__ Weights weights(const GemmTile& tile, int row_tile) const {
    return {packed, tile.expert, row_tile};
  }
};
