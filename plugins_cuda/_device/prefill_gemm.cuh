// The prefill GEMM: D[weight rows, tokens] = W·Xᵀ for prompt chunks, dense or grouped by expert.
//
// A CTA computes tiles of 128 weight rows × up to 256 tokens, 64 values of K (a panel) at a time.
// Two consumer warpgroups hold 64 rows each. Weights are loaded from global memory to registers, a
// few panels ahead, in the packed order of wgmma's A operand; MXFP4 is decoded there. Tokens are
// panels (prefill_panel.cuh): a producer thread copies them through a ring in shared memory, one
// bulk copy per panel. While the wgmma of a panel run, a warp decodes its weights of the next panel
// and queues it.
//
// The sum of an output element is accumulated over k in rising order, 16 values per wgmma, in one
// fp32 register. It depends neither on the tile's number of tokens nor on other rows.
//
// A panel of a 128 × 256 tile has 4.2 MFLOP, 1024 cycles of the tensor cores. It writes 32 KB to
// shared memory and reads 64 KB from it: 94 of 128 bytes per cycle. From L2 it reads 32 KB of
// tokens and 16 KB of bf16 weights (4.25 KB of MXFP4). At 7.5 TB/s this limits bf16 to 640 TFLOP/s
// and MXFP4 to 870.
//
// C: kKBlocks (K/32), kRowTiles (packed tiles of 16 weight rows, of one expert), kColumns (tokens
// of the widest tile, a multiple of 16), kStages, kWgmma (0: mma.sync), kSharedBytes.
#pragma once

#include "bf16.cuh"
#include "prefill_panel.cuh"
#include "ptx_wgmma.cuh"
#include "ring_place.cuh"

constexpr int kConsumerWarps = 8;
constexpr int kGemmThreads = 32 * (kConsumerWarps + 4);  // a warpgroup for the producer thread
constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;
static_assert(2 * kConsumerRegisters + kProducerRegisters <= 3 * registers_at_entry(kGemmThreads),
              "the register file suffices");
constexpr int kTileRows = 16 * kConsumerWarps;
constexpr int kGroupRows = kTileRows / 2;

// 16 · kConsumerWarps weight rows of one expert × some tokens.
struct GemmTile {
  int row_tile;  // the first packed tile of 16 weight rows; negative after the last tile
  int expert;    // of the weights
  int first;     // the first row of the panels, a multiple of 8
  int columns;   // tokens that are computed, a multiple of 16
  int live;      // tokens that are stored
};

__device__ __forceinline__ GemmTile no_tile() {
  return {-1, 0, 0, 0, 0};
}

template <class C>
struct TileRing : Ring<C::kStages> {
  static constexpr int kPanels = ceil_div(C::kKBlocks, 2);
  static constexpr int kStageBytes = C::kColumns * kPanelRowBytes;
  GemmTile tile[C::kStages];  // valid for the first stage of a tile
};

// Fill the ring, tile after tile. One thread executes it. It looks up the next tile while it
// copies: first its number, and after half of the panels its description, so that no read from L2
// delays a copy.
template <class C, class Gemm>
__device__ __forceinline__ void produce(const Gemm& gemm, TileRing<C>& ring,
                                        unsigned char* stages) {
  constexpr int kPanels = TileRing<C>::kPanels;
  RingPlace<C::kStages> place;
  GemmTile tile = gemm.tile(gemm.lookup(gemm.first()));
  while (tile.row_tile >= 0) {
    const uint32_t bytes = static_cast<uint32_t>(tile.columns) * kPanelRowBytes;
    const unsigned char* source = gemm.panels() + panel_chunk(0, 0, tile.first, 0);
    const auto copy = [&](int first, int end) {
      for (int panel = first; panel < end; ++panel) {
        mbarrier_wait(&ring.empty[place.slot], place.parity ^ 1);
        if (panel == 0) ring.tile[place.slot] = tile;
        mbarrier_expect_bytes(&ring.full[place.slot], bytes);
        bulk_copy_to_shared(stages + place.slot * TileRing<C>::kStageBytes, source, bytes,
                            &ring.full[place.slot]);
        source += static_cast<size_t>(gemm.panel_rows()) * kPanelRowBytes;
        place.advance();
      }
    };
    const int number = gemm.next(tile);
    copy(0, kPanels / 2);
    const auto entry = gemm.lookup(number);
    copy(kPanels / 2, kPanels);
    tile = gemm.tile(entry);
  }
  mbarrier_wait(&ring.empty[place.slot], place.parity ^ 1);
  ring.tile[place.slot] = tile;
  mbarrier_arrive(&ring.full[place.slot]);
}

// Multiply one panel: 16 weight rows of each warp (a: four k16 slices) × the stage's tokens.
template <bool wgmma, int columns>
__device__ __forceinline__ void multiply_panel(float (&sums)[columns / 2], uint32_t (&a)[4][4],
                                               const unsigned char* stage) {
  if constexpr (wgmma) {
    const uint64_t matrix = wgmma_matrix(stage);
    wgmma_pin(sums);
    wgmma_pin(a);
    wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < 4; ++slice) wgmma_bf16<columns>(sums, a[slice], matrix + 2 * slice);
    wgmma_commit();
  } else {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int slice = 0; slice < 4; ++slice) {
#pragma unroll
      for (int j = 0; j < columns / 8; ++j) {
        const unsigned char* row = stage + (8 * j + g) * kPanelRowBytes + 4 * t;
        const uint32_t b[2] = {
            *reinterpret_cast<const uint32_t*>(row + ((2 * slice ^ g) << 4)),
            *reinterpret_cast<const uint32_t*>(row + (((2 * slice + 1) ^ g) << 4))};
        mma_bf16(*reinterpret_cast<float (*)[4]>(&sums[4 * j]), a[slice], b);
      }
    }
  }
}

// The weights of a warp that are in flight: panel p in place p % kAhead. Places are compile-time
// indices, because a register that is the target of a load cannot be moved without waiting for it.
template <class Weights>
struct WeightQueue {
  Weights weights;
  typename Weights::Raw raw[Weights::kAhead];

  __device__ __forceinline__ void start(const Weights& of_tile) {
    weights = of_tile;
#pragma unroll
    for (int place = 0; place < Weights::kAhead; ++place) weights.load_next(raw[place], place);
  }
};

// The loop of a consumer warp over the panels of a tile.
template <class C, int columns, class Weights>
struct TileLoop {
  static constexpr bool kWgmma = C::kWgmma != 0;
  WeightQueue<Weights>& queue;
  TileRing<C>& ring;
  RingPlace<C::kStages>& place;
  const unsigned char* stages;
  float (&sums)[columns / 2];
  uint32_t decoded[2][4][4];  // A operands of four wgmma, of a panel and of the next one

  // Decode a panel, and load the next one into its place.
  template <int at>
  __device__ __forceinline__ void take(int panel) {
    Weights::decode(queue.raw[at], decoded[at % 2]);
    queue.weights.load_next(queue.raw[at], panel + Weights::kAhead);
  }

  // Call it after the wait for the panel's stage. It then waits for the next stage, which always
  // exists: the first of the next tile, or the end marker. That wait also keeps ptxas from moving
  // the wait for this panel's wgmma before the decoding of the next panel.
  template <int at>
  __device__ __forceinline__ void step(int panel) {
    multiply_panel<kWgmma, columns>(sums, decoded[at % 2],
                                    stages + place.slot * TileRing<C>::kStageBytes);
    take<(at + 1) % Weights::kAhead>(panel + 1);
    const int spent = place.slot;
    place.advance();
    mbarrier_wait(&ring.full[place.slot], place.parity);
    if constexpr (kWgmma) {
      wgmma_wait<0>();
      wgmma_pin(sums);
      wgmma_pin(decoded[at % 2]);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&ring.empty[spent]);
  }

  template <int at, int count>
  __device__ __forceinline__ void steps(int panel) {
    if constexpr (at < count) {
      step<at>(panel + at);
      steps<at + 1, count>(panel);
    }
  }
};

// A consumer warp, and the description of its next tile.
template <class C, class Gemm>
struct Consumer {
  using Weights = typename Gemm::Weights;
  static constexpr int kPanels = TileRing<C>::kPanels;
  const Gemm& gemm;
  TileRing<C>& ring;
  const unsigned char* stages;
  uint16_t* staging;
  RingPlace<C::kStages> place;
  WeightQueue<Weights> queue;
  GemmTile tile;

  // Wait for the first stage of the next tile, and load the tile's first weights. One lane reads
  // the tile, the lane that releases the stage.
  __device__ __forceinline__ void next() {
    mbarrier_wait(&ring.full[place.slot], place.parity);
    tile = no_tile();
    if (threadIdx.x % 32 == 0) tile = ring.tile[place.slot];
    int* const parts[] = {&tile.row_tile, &tile.expert, &tile.first, &tile.columns, &tile.live};
#pragma unroll
    for (int* part : parts) *part = __shfl_sync(kAllLanes, *part, 0);
    if (tile.row_tile >= 0)
      queue.start(gemm.weights(tile, tile.row_tile + static_cast<int>(threadIdx.x) / 32));
  }

  template <int columns>
  __device__ __forceinline__ void multiply() {
    constexpr int whole = kPanels / Weights::kAhead * Weights::kAhead;
    static_assert(Weights::kAhead % 2 == 0, "decoded panels alternate between two buffers");
    const GemmTile done = tile;
    const auto ahead = gemm.ahead_of(done);
    float sums[columns / 2];
#pragma unroll
    for (int i = 0; i < columns / 2; ++i) sums[i] = 0.0f;
    TileLoop<C, columns, Weights> loop{queue, ring, place, stages, sums};
    loop.template take<0>(0);
#pragma unroll 1
    for (int panel = 0; panel < whole; panel += Weights::kAhead)
      loop.template steps<0, Weights::kAhead>(panel);
    loop.template steps<0, kPanels - whole>(whole);
    next();
    gemm.template store<columns>(done, ahead, sums, staging);
  }

  // Multiply with the narrowest width up to ``columns`` that covers the tile.
  template <int columns>
  __device__ __forceinline__ void multiply_narrowest() {
    if constexpr (Gemm::kAnyColumns && columns > 16) {
      if (tile.columns < columns) return multiply_narrowest<columns - 16>();
    }
    multiply<columns>();
  }

  __device__ __forceinline__ void run() {
    next();
    while (tile.row_tile >= 0) multiply_narrowest<C::kColumns>();
  }
};

// The body of a kernel of kGemmThreads threads. ``ring`` is in shared memory; ``shared`` has
// kStages stages, then the staging buffers of two warpgroups.
//
// ``Gemm`` declares:
// - Weights, the 16 rows of a warp: kAhead, Raw, load_next, decode;
// - kAnyColumns, whether tiles differ in their number of tokens;
// - kStagingValues, 16-bit values per token and warpgroup;
// - panels(), panel_rows();
// - for the producer: first() and next(tile), the number of a tile; lookup(number), the data loaded
//   for it; tile(entry);
// - weights(tile, row_tile);
// - ahead_of(tile), the data that a lane loads before the tile's sums, for
//   store<columns>(tile, ahead, sums, staging).
template <class C, class Gemm>
__device__ __forceinline__ void prefill_gemm(const Gemm& gemm, TileRing<C>& ring,
                                             unsigned char* shared) {
  constexpr int kStagesBytes = C::kStages * TileRing<C>::kStageBytes;
  static_assert(kStagesBytes + 2 * 2 * C::kColumns * Gemm::kStagingValues == C::kSharedBytes,
                "as the launch says");
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      mbarrier_init(&ring.full[i], 1);
      mbarrier_init(&ring.empty[i], kConsumerWarps);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  pdl_launch_dependents();
  pdl_wait();
  if (warp >= kConsumerWarps) {
    registers_lower<kProducerRegisters>();
    if (threadIdx.x == 32 * kConsumerWarps) produce(gemm, ring, shared);
  } else {
    registers_raise<kConsumerRegisters>();
    uint16_t* const staging = reinterpret_cast<uint16_t*>(shared + kStagesBytes) +
                              warp / 4 * C::kColumns * Gemm::kStagingValues;
    Consumer<C, Gemm> consumer{gemm, ring, shared, staging};
    consumer.run();
  }
}
