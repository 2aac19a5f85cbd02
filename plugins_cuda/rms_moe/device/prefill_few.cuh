// Grouped GEMMs of a prompt's experts with few rows each, at the bandwidth of memory.
//
// With 16 rows per expert, the products of a tile take less time than the loads of its weights. The
// weights that prefill_gemm.cuh has in flight are a few panels in registers, 17 KB per
// multiprocessor. With a latency of a microsecond this is 2.2 TB/s. Here bulk copies move MXFP4 to
// a separate ring of up to 170 KB, which remains filled between tiles. 12 or 16 warps hold 16
// weight rows each, so that fewer tiles read the tokens again. One thread copies tokens, one warp
// weights. The sum of an output element is that of prefill_gemm.cuh, wgmma by wgmma.
//
// With 512 rows of GPT-OSS-120B, 16 rows per expert, a layer reads 1.7 GB of weights, 370 µs at 4.6
// TB/s, and 0.6 GB of tokens from L2. A panel of 256 × 32 must arrive within 430 cycles. It takes
// the four schedulers about 400 cycles to decode, and the tensor cores 256.
//
// Config: the members of prefill_experts.cuh, kWarps (that hold weight rows), kChunkSteps (steps of
// a packed tile that one copy moves, a divisor of a stage's), kChunks (stages of the weights'
// ring), kWarpTiles (packed tiles of a warp's 16 rows: 1, or 2 of 8 rows).
#pragma once

#include "prefill_experts.cuh"

using mxfp4_experts::decode_panel, mxfp4_experts::ExpertRaw, mxfp4_experts::kPackedTileBytes;

constexpr int kFewWarps = Config::kWarps;
constexpr int kFewThreads = 32 * (kFewWarps + 2);
constexpr int kSlotTiles = kFewWarps * Config::kWarpTiles;
constexpr int kChunkBytes = kStepBytes * (Config::kChunkSteps + 1);
constexpr int kSlotBytes = kSlotTiles * kChunkBytes;
constexpr int kTilesAhead = 4;
constexpr int kPanels = TileRing<Config>::kPanels, kTokenBytes = TileRing<Config>::kStageBytes;
constexpr int kTokensBytes = Config::kStages * kTokenBytes;
constexpr int kWeightsBytes = Config::kChunks * kSlotBytes;
static_assert(kStageSteps % Config::kChunkSteps == 0, "a chunk is of one stage");

using TokenPlace = RingPlace<Config::kStages>;
using ChunkPlace = RingPlace<Config::kChunks>;
using TilePlace = RingPlace<kTilesAhead>;

struct FewRings {
  Ring<Config::kStages> tokens;
  Ring<Config::kChunks> weights;
  Ring<kTilesAhead> tiles;
  GemmTile tile[kTilesAhead];
};

// One thread initializes the ring before any other uses it; ``takers`` threads release each stage.
template <int stages>
__device__ __forceinline__ void start_ring(Ring<stages>& ring, int takers) {
  for (int i = 0; i < stages; ++i) {
    mbarrier_init(&ring.full[i], 1);
    mbarrier_init(&ring.empty[i], takers);
  }
}

// Wait for the next tile of a warp, which produce_tokens() has looked up.
__device__ __forceinline__ GemmTile take_tile(FewRings& rings, TilePlace& place) {
  mbarrier_wait(&rings.tiles.full[place.slot], place.parity);
  const GemmTile tile = rings.tile[place.slot];
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(&rings.tiles.empty[place.slot]);
  place.advance();
  return tile;
}

// One thread looks up tiles, each while it copies the tokens of the previous one.
template <class Gemm>
__device__ __forceinline__ void produce_tokens(const Gemm& gemm, FewRings& rings,
                                               unsigned char* stages) {
  TokenPlace place;
  TilePlace at;
  const auto publish = [&](const GemmTile& tile) {
    mbarrier_wait(&rings.tiles.empty[at.slot], at.parity ^ 1);
    rings.tile[at.slot] = tile;
    mbarrier_arrive(&rings.tiles.full[at.slot]);
    at.advance();
  };
  GemmTile tile = gemm.tile(gemm.lookup(gemm.first()));
  publish(tile);
  while (tile.row_tile >= 0) {
    const uint32_t bytes = static_cast<uint32_t>(tile.columns) * kPanelRowBytes;
    const unsigned char* source = gemm.panels() + panel_chunk(0, 0, tile.first, 0);
    const auto copy = [&](int first, int end) {
      for (int panel = first; panel < end; ++panel) {
        mbarrier_wait(&rings.tokens.empty[place.slot], place.parity ^ 1);
        mbarrier_expect_bytes(&rings.tokens.full[place.slot], bytes);
        bulk_copy_to_shared(stages + place.slot * kTokenBytes, source, bytes,
                            &rings.tokens.full[place.slot]);
        source += static_cast<size_t>(gemm.panel_rows()) * kPanelRowBytes;
        place.advance();
      }
    };
    const int number = gemm.next(tile);
    copy(0, kPanels / 3);
    const auto entry = gemm.lookup(number);
    copy(kPanels / 3, 2 * kPanels / 3);
    const GemmTile next = gemm.tile(entry);
    publish(next);
    copy(2 * kPanels / 3, kPanels);
    tile = next;
  }
}

// One warp copies chunks of all weight rows, tile after tile.
template <class Gemm>
__device__ __forceinline__ void produce_weights(const Gemm& gemm, FewRings& rings,
                                                unsigned char* slots) {
  constexpr int kExpertTiles = Config::kRowTiles * Config::kWarpTiles;
  const int lane = threadIdx.x % 32;
  ChunkPlace place;
  TilePlace at;
  for (GemmTile tile = take_tile(rings, at); tile.row_tile >= 0; tile = take_tile(rings, at)) {
    for (int first = 0; first < Config::kSteps; first += Config::kChunkSteps) {
      const int stage = first / kStageSteps, within = first % kStageSteps;
      const uint32_t codes =
          static_cast<uint32_t>(min(Config::kChunkSteps, Config::kSteps - first)) * kStepBytes;
      Mbarrier* const full = &rings.weights.full[place.slot];
      mbarrier_wait(&rings.weights.empty[place.slot], place.parity ^ 1);
      if (lane == 0) mbarrier_expect_bytes(full, kSlotTiles * (kStepBytes + codes));
      __syncwarp();
      for (int i = lane; i < kSlotTiles; i += 32) {
        const int row = min(tile.row_tile * Config::kWarpTiles + i, kExpertTiles - 1);
        const unsigned char* const source =
            gemm.packed +
            (static_cast<size_t>(tile.expert) * kExpertTiles + row) * kPackedTileBytes +
            stage * kStageBytes;
        unsigned char* const to = slots + place.slot * kSlotBytes + i * kChunkBytes;
        if (within == 0) {
          bulk_copy_once_to_shared(to, source, kStepBytes + codes, full);
        } else {
          bulk_copy_once_to_shared(to, source, kStepBytes, full);
          bulk_copy_once_to_shared(to + kStepBytes, source + kStepBytes * (1 + within), codes,
                                   full);
        }
      }
      place.advance();
    }
  }
}

// A lane's position in its warp's weights in shared memory, over the steps of a tile.
struct ChunkCursor {
  Ring<Config::kChunks>& ring;
  const unsigned char* slots;
  ChunkPlace place;
  int codes = 0;   // offset from ``slots`` of 8 bytes, [half]
  int scales = 0;  // one byte; that of the upper mma rows is 128 bytes further
  int left = 0;    // steps of this chunk
  int done = 0;    // steps of the tile, including this chunk's

  __device__ __forceinline__ void enter() {
    const int lane = threadIdx.x % 32, warp = static_cast<int>(threadIdx.x) / 32;
    mbarrier_wait(&ring.full[place.slot], place.parity);
    const int own = place.slot * kSlotBytes + warp * Config::kWarpTiles * kChunkBytes;
    codes = own + kStepBytes + lane * 8;
    scales = own + lane / 4 * 16 + done % kStageSteps;
    left = min(Config::kChunkSteps, Config::kSteps - done);
    done += left;
  }

  // Load a step of this warp's packed tile ``tile``.
  __device__ __forceinline__ void load(int tile, uint2& words, uint32_t& low, uint32_t& high) {
    words = *reinterpret_cast<const uint2*>(slots + codes + tile * kChunkBytes);
    low = slots[scales + tile * kChunkBytes];
    high = slots[scales + tile * kChunkBytes + 128];
  }

  // Advance by a step; release a chunk after all lanes have loaded its last step.
  __device__ __forceinline__ void advance() {
    codes += kStepBytes;
    scales += 1;
    if (--left > 0) return;
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&ring.empty[place.slot]);
    place.advance();
    if (done == Config::kSteps) done = 0;
  }

  // Load a panel for decode_panel().
  __device__ __forceinline__ void load_panel(ExpertRaw& raw, int panel) {
    if constexpr (Config::kWarpTiles == 2) {
      if (left == 0) enter();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint2 words;
        load(half, words, raw.scales[0][half], raw.scales[1][half]);
        raw.codes[0][half] = words.x;
        raw.codes[1][half] = words.y;
      }
      advance();
    } else {
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        if (Config::kKBlocks % 2 != 0 && 2 * panel + block >= Config::kKBlocks) {
          raw.codes[block][0] = raw.codes[block][1] = 0;
          raw.scales[block][0] = raw.scales[block][1] = 1;
          return;
        }
        if (left == 0) enter();
        uint2 words;
        load(0, words, raw.scales[block][0], raw.scales[block][1]);
        raw.codes[block][0] = words.x;
        raw.codes[block][1] = words.y;
        advance();
      }
    }
  }
};

// One consumer warp.
template <class Gemm>
struct FewConsumer {
  const Gemm& gemm;
  FewRings& rings;
  const unsigned char* stages;
  uint16_t* staging;
  ChunkCursor weights;
  TokenPlace place;
  GemmTile tile;

  __device__ __forceinline__ void wait_tokens() {
    mbarrier_wait(&rings.tokens.full[place.slot], place.parity);
  }

  // Call it after the wait for the panel's tokens. It waits for the next ones too, which keeps
  // ptxas from moving the wait for this panel's wgmma before the decoding of the next panel.
  template <int columns, int at>
  __device__ __forceinline__ void step(int panel, float (&sums)[columns / 2],
                                       uint32_t (&decoded)[2][4][4]) {
    multiply_panel<true, columns>(sums, decoded[at], stages + place.slot * kTokenBytes);
    const int spent = place.slot;
    place.advance();
    if (panel + 1 < kPanels) {
      ExpertRaw raw;
      weights.load_panel(raw, panel + 1);
      decode_panel(raw, decoded[at ^ 1]);
      wait_tokens();
    }
    wgmma_wait<0>();
    wgmma_pin(sums);
    wgmma_pin(decoded[at]);
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&rings.tokens.empty[spent]);
  }

  template <int columns>
  __device__ __forceinline__ void multiply() {
    const auto ahead = gemm.ahead_of(tile);
    float sums[columns / 2];
#pragma unroll
    for (int i = 0; i < columns / 2; ++i) sums[i] = 0.0f;
    uint32_t decoded[2][4][4];
    ExpertRaw raw;
    weights.load_panel(raw, 0);
    decode_panel(raw, decoded[0]);
    wait_tokens();
#pragma unroll 1
    for (int panel = 0; panel + 1 < kPanels; panel += 2) {
      step<columns, 0>(panel, sums, decoded);
      step<columns, 1>(panel + 1, sums, decoded);
    }
    if constexpr (kPanels % 2 != 0) step<columns, 0>(kPanels - 1, sums, decoded);
    gemm.template store<columns>(tile, ahead, sums, staging);
  }

  // Multiply with the narrowest width up to ``columns`` that covers the tile.
  template <int columns>
  __device__ __forceinline__ void multiply_narrowest() {
    if constexpr (columns > 16) {
      if (tile.columns < columns) return multiply_narrowest<columns - 16>();
    }
    multiply<columns>();
  }

  __device__ __forceinline__ void run() {
    TilePlace at;
    for (tile = take_tile(rings, at); tile.row_tile >= 0; tile = take_tile(rings, at))
      multiply_narrowest<Config::kColumns>();
  }
};

// The body of a kernel of kFewThreads threads. ``shared`` has kStages stages of tokens, kChunks
// stages of weights, then the staging buffers of every warpgroup. ``Gemm`` is that of
// prefill_gemm().
template <class Gemm>
__device__ __forceinline__ void few_gemm(const Gemm& gemm, FewRings& rings, unsigned char* shared) {
  static_assert(
      kTokensBytes + kWeightsBytes + kFewWarps / 4 * 2 * Config::kColumns * Gemm::kStagingValues ==
          Config::kSharedBytes,
      "as the launch says");
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x == 0) {
    start_ring(rings.tokens, kFewWarps);
    start_ring(rings.weights, kFewWarps);
    start_ring(rings.tiles, kFewWarps + 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  pdl_launch_dependents();
  pdl_wait();
  unsigned char* const slots = shared + kTokensBytes;
  if (warp == kFewWarps) {
    if (threadIdx.x % 32 == 0) produce_tokens(gemm, rings, shared);
  } else if (warp == kFewWarps + 1) {
    produce_weights(gemm, rings, slots);
  } else {
    uint16_t* const staging = reinterpret_cast<uint16_t*>(slots + kWeightsBytes) +
                              warp / 4 * Config::kColumns * Gemm::kStagingValues;
    FewConsumer<Gemm> consumer{gemm, rings, shared, staging, {rings.weights, slots}};
    consumer.run();
  }
}
