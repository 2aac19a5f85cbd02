// The prefill GEMM: D[weight rows, tokens] = W·Xᵀ for prompt chunks, dense or grouped by expert.
//
// A CTA computes tiles of 128 weight rows × up to 256 tokens, 64 values of k (a panel) at a time.
// Two warpgroups of consumers hold 64 rows each: weights go from global memory to registers in the
// packed order, which is that of wgmma's A operand (MXFP4 is decoded there), a few panels ahead;
// tokens come as panels (prefill_panel.cuh) through a ring of shared memory that one producer
// thread fills by bulk copies, one a panel. While the wgmma of a panel run, a warp decodes its
// weights of the next one and queues it.
// The sum of one output element goes over k in rising order, 16 values a wgmma, into one fp32
// register, whatever the tile's number of tokens: it does not depend on the rows around.
//
// Numbers for one panel of a 128 × 256 tile: 4.2 MFLOP, 1024 cycles of the tensor cores. Shared
// memory: 32 KB in, 64 KB out (94 B a cycle of 128). From L2: 32 KB of tokens and 16 KB of bf16
// weights (4.25 KB of MXFP4): at 7.5 TB/s the bf16 form is bound to 640 TFLOP/s, MXFP4 to 870.
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
              "no more registers than there are");
constexpr int kTileRows = 16 * kConsumerWarps;
constexpr int kGroupRows = kTileRows / 2;

// 16 · kConsumerWarps weight rows of one expert by some tokens.
struct GemmTile {
  int row_tile;  // the first packed tile of 16 weight rows; negative: there are no more tiles
  int expert;    // whose weights
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
  GemmTile tile[C::kStages];  // of the stage that is the first of a tile
};

// Fills the ring for one tile after another. One thread. It takes the next tile while it copies:
// a number at once, what that number stands for behind half of the panels, so that no answer from
// L2 holds up a copy.
template <class C, class Gemm>
__device__ __forceinline__ void produce(const Gemm& gemm, TileRing<C>& ring,
                                        unsigned char* stages) {
  constexpr int kPanels = TileRing<C>::kPanels;
  RingPlace<C::kStages> place;
  GemmTile tile = gemm.tile(gemm.found(gemm.first()));
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
    const auto found = gemm.found(number);
    copy(kPanels / 2, kPanels);
    tile = gemm.tile(found);
  }
  mbarrier_wait(&ring.empty[place.slot], place.parity ^ 1);
  ring.tile[place.slot] = tile;
  mbarrier_arrive(&ring.full[place.slot]);
}

// Adds one panel: 16 weight rows of each warp (a: four slices of 16 of k) times the stage's tokens.
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

// The weights that a warp has under way: panel p in place p % kAhead. Places are compile-time
// numbers: a register that a load will fill cannot be moved without waiting for it.
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

// What one consumer warp needs for one panel after another of a tile.
template <class C, int columns, class Weights>
struct TileLoop {
  static constexpr bool kWgmma = C::kWgmma != 0;
  WeightQueue<Weights>& queue;
  TileRing<C>& ring;
  RingPlace<C::kStages>& place;
  const unsigned char* stages;
  float (&sums)[columns / 2];
  uint32_t decoded[2][4][4];  // the A operands of a panel's four wgmma, and of the next panel's

  // Decodes panel ``panel``, and asks for the panel that comes in its place.
  template <int at>
  __device__ __forceinline__ void take(int panel) {
    Weights::decode(queue.raw[at], decoded[at % 2]);
    queue.weights.load_next(queue.raw[at], panel + Weights::kAhead);
  }

  // Behind the wait for the panel's stage. The wait for the next one (there is always one: the next
  // tile's first, or the one that says there is none) also keeps ptxas from moving the wait for
  // this panel's wgmma in front of what decodes the next.
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

// One consumer warp, and what it knows of its next tile.
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

  // Waits for the first stage of the next tile, and asks for the tile's first weights. One lane
  // reads, the one that gives the stage back.
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
    static_assert(Weights::kAhead % 2 == 0, "two decoded panels take turns");
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

  // The narrowest of the widths up to ``columns`` that holds the tile.
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

// The body of a kernel of kGemmThreads threads; ``ring`` is in shared memory; ``shared`` is
// kStages stages, then the staging of two warpgroups.
//
// ``Gemm`` says: Weights (16 rows of a warp: kAhead, Raw, load_next, decode), kAnyColumns (tiles
// differ in their tokens), kStagingValues (16-bit values of a token and warpgroup), panels(),
// panel_rows(); for the producer first() and next(tile), a tile's number, found(number), what is
// loaded for it, and tile(found); weights(tile, row_tile); ahead_of(tile), what a lane loads before
// the tile's sums for store<columns>(tile, ahead, sums, staging).
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
