// PagedTreeAttention for decoding with several rows per sequence, such as trees, or many, such as
// re-verified tokens of SpecPV: with wgmma, and with the bits of kernel.cu.
//
//   q … ancestor_bits  see attend_split (kernel.cu); heads are 64 or 128 wide, WINDOW is 0
//   workspace_sums    f32  [T, KV_HEADS, SLOTS, GROUP, 2], out, of splits with visible keys
//   workspace_values  f32  [T, KV_HEADS, SLOTS, GROUP, WIDTH], out, of the same splits
//
// Grid (SLOTS, KV_HEADS, shares of the row tiles): about as many CTAs as fit on the GPU, each with
// a split of every sequence's context, so that different lengths are balanced. A CTA processes row
// tiles in sequence, each with up to 8·ROW_GROUPS rows of a sequence (16·ROW_GROUPS with up to 4
// query heads per KV head). Each row tile reads the keys again, which is not the bottleneck.
// Sequences with up to FEW_ROWS rows have another kernel.
//
// Each of WARPGROUPS (4, or 2 for wide heads, whose sums need twice the registers) has 8 rows × 8
// heads or 16 × 4. With fewer rows, ROW_GROUPS warpgroups share a tile run of the split, and
// WARPGROUPS / ROW_GROUPS tile runs are processed at the same time. Another warpgroup copies tiles
// of 32 keys and values to a ring. A warp of the last one opens the next rows, so that their keys
// arrive before the current rows end. The scores of a tile run on the tensor cores together with
// the values of the previous one (FlashAttention-3, arXiv 2407.08608, section 3.2), and the softmax
// of one warpgroup overlaps with the products of the others.
//
// The bits are those of kernel.cu. The tiles of a tile run are processed one by one in the steps of
// that kernel, and wgmma's sums of k16 products have the bits of mma's (measured: 3.7 million sums
// of three distributions). The tile runs of a split are merged in order; join_slots (join_slots.cu)
// merges splits.
//
// A tile of width 64 has 8 KB, which a multiprocessor reads in 420 cycles (19 B per cycle). For
// each row group it takes 128 cycles of the tensor cores and 145 for its exponentials. Width 128
// doubles all of these except the exponentials.
#include "device/chain_state.cuh"
#include "device/config.cuh"

namespace {

constexpr int kGroups = Config::kWarpgroups;
constexpr int kGroupWarps = 4, kGroupThreads = 32 * kGroupWarps;
constexpr int kGroupRows = kGroupWarps * kWarpRows;
constexpr int kRows = Config::kRowGroups * kGroupRows;
constexpr int kHolders = Config::kRowGroups * kGroupThreads;  // threads with separate sums
constexpr int kThreads = (kGroups + 2) * kGroupThreads;
constexpr int kConsumerRegisters = Config::kWidth == 64 ? 104 : 208;
constexpr int kCopyRegisters = Config::kWidth == 64 ? 32 : 48, kOpenRegisters = kCopyRegisters;
static_assert(kCopyWarps == kGroupWarps, "a warpgroup copies");
static_assert(Config::kSlots > 1, "splits have workspaces");
static_assert(16 * (Config::kStages * 2 * kTileUnits + kHolders * (Config::kWidth / 8 + 1)) ==
                  Config::kSharedBytes,
              "the launch gives as much as the stages and Held take");
static_assert(Config::kRowGroups * kChainsAtOnce == kGroups,
              "every warpgroup has rows and a tile run");
static_assert(Config::kStages / kChainsAtOnce > 2, "a tile run has a stage for the next tile");
static_assert(kGroups * kConsumerRegisters + kCopyRegisters + kOpenRegisters <=
                  (kGroups + 2) * registers_at_entry(kThreads),
              "no more registers than there are");

// An open row tile; one without rows follows the last.
struct Opened {
  unsigned turn;  // number of tiles opened before
  int slot;       // the split of the context for this CTA
  int first;      // row of the launch
  ManyRow all[kRows];
  ManyRows rows;
  int full_last[Config::kRowGroups];  // shared positions up to here are visible to all rows of a
                                      // warpgroup
};

constexpr int kAhead = 4;  // row tiles that are opened at once

// It is in shared memory and read repeatedly, because registers are scarce.
struct Openings {
  Opened at[kAhead];
  Mbarrier full[kAhead], empty[kAhead];
};

// The distance of a CTA's splits from one row tile to the next, so that all CTAs get keys of short
// contexts equally often.
constexpr int kSlotStep = 5;

// A warpgroup that attends for its 8 rows, one tile run after the other.
struct Consumer {
  Chain chain;
  StageRing& ring;
  LowMatrix stages;
  RingCount& place;
  const ManyRows& rows;
  int warp_row;   // the first of this warp's
  int full_last;  // shared positions up to here are visible to all rows of the warpgroup

  __device__ __forceinline__ LowMatrix keys(int slot) const {
    return stages + slot * 2 * kTileUnits;
  }
  __device__ __forceinline__ LowMatrix values(int slot) const {
    return stages + (slot * 2 * kTileUnits + kTileUnits);
  }

  // Return the stage of the tile `tiles` before the next one.
  __device__ __forceinline__ int behind(int tiles) const {
    return RingCount{place.passed - tiles * kChainsAtOnce}.slot();
  }

  __device__ __forceinline__ void give_back(int slot) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&ring.empty[slot]);
  }

  // Wait for the next tile; return false after the last. Two earlier tiles remain valid.
  __device__ __forceinline__ bool await(Tiles& tiles) {
    const bool more = tiles.advance();
    if (more) {
      mbarrier_wait(&ring.full[place.slot()], place.parity());
      fence_async_shared();
    }
    return more;
  }

  // Whether a tile is visible to rows of other warpgroups only.
  __device__ __forceinline__ bool passes(const Tiles& tiles) const {
    return Config::kRowGroups > 1 && tiles.own >= 0 &&
           tiles.own / kGroupRows != warp_row / kGroupRows;
  }

  // Wait for the scores of a tile, and convert them to weights; `rescale` is the factor of the
  // values.
  template <int pending>
  __device__ __forceinline__ void weigh(int from, int own, float (&rescale)[kHalves]) {
    wgmma_wait<pending>();
    wgmma_pin(chain.scores());
    if (own >= 0 || from + kTile - 1 > full_last) {
      const int key = from + static_cast<int>(thread_anew() % 4 * 2);
#pragma unroll
      for (int j = 0; j < kHalves; ++j) {
        const Span span = rows.seen(min(warp_row + Mma::row(j), rows.count - 1), own);
#pragma unroll
        for (int i = 0; i < kTile / 4; ++i) {
          const int position = key + i / 2 * 8 + i % 2;
          if (position >= span.first && position <= span.last) continue;
          chain.score[i / 2][2 * j + i % 2] = no_maximum();
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kHalves; ++j) {
      rescale[j] = weigh_tile(chain.score, j, kScale, chain.maximum[j], chain.sum[j]);
    }
  }

  // A factor of 1, which is the usual one in a long tile run, changes nothing.
  __device__ __forceinline__ void scale_values(const float (&by)[kHalves]) {
    if (!__any_sync(kAllLanes, by[0] != 1.0f || by[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < Config::kWidth / 2; ++i) chain.values[i / 4][i % 4] *= by[i % 4 / 2];
  }

  // Compute the sums of a tile run. In the loop, the wait for the next tile comes before that for
  // the values, which ptxas would otherwise move before the weights.
  __device__ __forceinline__ void run(Tiles& tiles) {
    float rescale[kHalves];
    chain.clear();
    bool more = await(tiles);
#pragma unroll 1
    while (more) {
      if (passes(tiles)) {
        place.passed += kChainsAtOnce;
        give_back(behind(1));
        more = await(tiles);
        continue;
      }
      chain.begin_scores(keys(place.slot()));
      weigh<0>(tiles.from, tiles.own, rescale);
      scale_values(rescale);
      chain.pack();
      place.passed += kChainsAtOnce;
      more = await(tiles);
#pragma unroll 1
      while (more && !passes(tiles)) {
        chain.begin_scores(keys(place.slot()));
        chain.begin_values(values(behind(1)));
        weigh<1>(tiles.from, tiles.own, rescale);
        place.passed += kChainsAtOnce;
        more = await(tiles);
        chain.end_values();
        give_back(behind(2));
        scale_values(rescale);
        chain.pack();
      }
      chain.begin_values(values(behind(1)));
      chain.end_values();
      give_back(behind(1));
    }
  }

  // In a warpgroup without rows: release all tiles.
  __device__ __forceinline__ void pass(Tiles& tiles) {
    chain.clear();
    while (await(tiles)) {
      place.passed += kChainsAtOnce;
      give_back(behind(1));
    }
  }
};

// The description of a launch's rows.
struct Inputs {
  const uint32_t* q;
  const int* row_start;
  const int* row_slot;
  const int* tree_start;
  const int* ancestor_bits;
};

// Open a row tile: `count` rows of a sequence from row `first` of the launch on; one warp calls it.
__device__ __forceinline__ void open(const Inputs& in, Opened& opened, unsigned turn, int sequence,
                                     int first, int count) {
  static_assert(kRows <= 32, "a lane opens a row");
  const int lane = thread_anew() % 32, start = in.tree_start[sequence];
  if (lane < kRows) {
    const int index = first + min(lane, count - 1);
    opened.all[lane] = open_many_row(index, in.row_slot, start, in.ancestor_bits);
  }
  __syncwarp();
  if (lane < Config::kRowGroups) {
    const ManyRow* rows = opened.all + lane * kGroupRows;
    int full_last = rows[0].shared;
    for (int i = 1; i < kGroupRows; ++i) full_last = min(full_last, rows[i].shared);
    opened.full_last[lane] = full_last;
  }
  if (lane > 0) return;
  const int view = sequence * Config::kViews +
                   (Config::kViews > 1 ? static_cast<int>(blockIdx.y) / Config::kShare : 0);
  opened.turn = turn;
  opened.slot = (blockIdx.x + kSlotStep * turn) % Config::kSlots;
  opened.first = first;
  opened.rows = ManyRows(opened.all, count, start, view * Config::kTable);
}

// The opening warp: it opens this CTA's row tiles as far ahead as possible, then one without rows.
__device__ __forceinline__ void open_all(const Inputs& in, Openings& openings) {
  const auto next = [&](unsigned turn) -> Opened& {
    mbarrier_wait(&openings.empty[turn % kAhead], turn / kAhead % 2 ^ 1);
    return openings.at[turn % kAhead];
  };
  const auto tell = [&](unsigned turn) {
    __syncwarp();
    if (thread_anew() % 32 == 0) mbarrier_arrive(&openings.full[turn % kAhead]);
  };
  unsigned number = 0, turn = 0;  // index of row tiles of the launch, and of this CTA
#pragma unroll 1
  for (int base = 0; base < Config::kBatch; base += 32) {
    const int own = base + static_cast<int>(thread_anew() % 32);
    const int first = in.row_start[min(own, Config::kBatch)];
    const int rows = in.row_start[min(own + 1, Config::kBatch)] - first;
#pragma unroll 1
    for (uint32_t many = __ballot_sync(kAllLanes, rows > Config::kFewRows); many != 0;
         many &= many - 1) {
      const int owner = __ffs(static_cast<int>(many)) - 1;
      const int begin = __shfl_sync(kAllLanes, first, owner);
      const int count = __shfl_sync(kAllLanes, rows, owner);
#pragma unroll 1
      for (int from = 0; from < count; from += kRows) {
        if (number++ % gridDim.z != blockIdx.z) continue;
        open(in, next(turn), turn, base + owner, begin + from, min(kRows, count - from));
        tell(turn++);
      }
    }
  }
  next(turn).rows.count = 0;
  tell(turn);
}

// The position of another warp in the sequence of open row tiles.
struct Reader {
  Openings& openings;
  const Opened* now;

  __device__ __forceinline__ explicit Reader(Openings& all) : openings(all), now(all.at) {
    mbarrier_wait(&openings.full[0], 0);
  }
  __device__ __forceinline__ bool ended() const {
    return now->rows.count == 0;
  }
  __device__ __forceinline__ void advance() {
    const unsigned turn = now->turn, next = turn + 1;
    __syncwarp();
    if (thread_anew() % 32 == 0) mbarrier_arrive(&openings.empty[turn % kAhead]);
    now = openings.at + next % kAhead;
    mbarrier_wait(&openings.full[next % kAhead], next / kAhead % 2);
  }
};

// A copying warp.
__device__ __forceinline__ void produce(const Pool& pool, Openings& openings, StageRing& ring,
                                        uint4* stages) {
  CopyingWarp warp(ring, stages);
#pragma unroll 1
  for (Reader reader(openings); !reader.ended(); reader.advance()) {
    warp.copy(pool, reader.now->rows, reader.now->slot);
  }
}

// An attending warpgroup: for every row tile, the sums of its rows over its tile runs.
__device__ __forceinline__ void consume(const Inputs& in, const SlotStates& slots,
                                        Openings& openings,
                                        Mbarrier (&joined)[Config::kRowGroups][kChains],
                                        StageRing& ring, uint4* stages) {
  const auto group = [] { return thread_anew() / kGroupThreads; };
  const int warp_row = thread_anew() / 32 * kWarpRows % kRows, row_group = warp_row / kGroupRows;
  const LowMatrix matrix{panel_matrix<Config::kWidth, kTile>(in_register(stages))};
  RingCount place{group() / Config::kRowGroups};
#pragma unroll 1
  for (Reader reader(openings); !reader.ended(); reader.advance()) {
    const Opened& opened = *reader.now;
    Consumer consumer{{}, ring, matrix, place, opened.rows, warp_row, opened.full_last[row_group]};
    load_query_rows(consumer.chain.queries, in.q, opened.all + warp_row);
    Tiles tiles(opened.rows, opened.slot, group() / Config::kRowGroups);
#pragma unroll 1
    do {
      if (Config::kRowGroups > 1 && row_group * kGroupRows >= opened.rows.count) {
        consumer.pass(tiles);
      } else {
        consumer.run(tiles);
      }
      const int chain = tiles.of_slot();
      Mbarrier* turns = joined[group() % Config::kRowGroups];
      if (kChainsAtOnce > 1) {
        mbarrier_wait(&turns[(chain + kChains - 1) % kChains], (opened.turn + (chain == 0)) % 2);
      }
      const Held<kHolders> held{
          reinterpret_cast<float4*>(stages + Config::kStages * 2 * kTileUnits) +
          thread_anew() % kHolders};
      if (chain == 0) held.clear();
      held.join(consumer.chain);
      if (chain == kChains - 1 && opened.slot < opened.rows.chunks()) {
        held.leave(slots, opened.first + warp_row, min(kWarpRows, opened.rows.count - warp_row),
                   opened.slot);
      }
      __syncwarp();
      if (kChainsAtOnce > 1 && thread_anew() % 32 == 0) mbarrier_arrive(&turns[chain]);
    } while (tiles.next_chain(kChainsAtOnce));
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attend_many(const uint32_t* q, const uint4* k_pool, const uint4* v_pool, const int* page_table,
                const int* row_start, const int* row_slot, const int* tree_start,
                const int* ancestor_bits, float2* workspace_sums, float4* workspace_values) {
  DYNAMIC_SHARED(uint4, stages);  // [STAGES][keys, values], aligned to 1024, then Held
  __shared__ StageRing ring;
  __shared__ Mbarrier joined[Config::kRowGroups][kChains];  // order the merge of tile runs
  __shared__ Openings openings;
  pdl_launch_dependents();
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < Config::kStages) {
    mbarrier_init(&ring.full[thread], 32);
    mbarrier_init(&ring.empty[thread], Config::kRowGroups * kGroupWarps);
  }
  if (thread < Config::kRowGroups * kChains) {
    mbarrier_init(&joined[thread / kChains][thread % kChains], kGroupWarps);
  }
  if (thread < kAhead) {
    mbarrier_init(&openings.full[thread], 1);
    mbarrier_init(&openings.empty[thread], kGroups * kGroupWarps + kCopyWarps);
  }
  mbarrier_init_fence();
  __syncthreads();
  pdl_wait();
  const Inputs in{q, row_start, row_slot, tree_start, ancestor_bits};
  const int group = thread / kGroupThreads;
  if (group == kGroups + 1) {
    registers_lower<kOpenRegisters>();
    if (thread % kGroupThreads < 32) open_all(in, openings);
  } else if (group == kGroups) {
    registers_lower<kCopyRegisters>();
    produce({k_pool, v_pool, page_table, ancestor_bits}, openings, ring, stages);
  } else {
    registers_raise<kConsumerRegisters>();
    const SlotStates slots{workspace_sums, workspace_values, nullptr, nullptr};
    consume(in, slots, openings, joined, *in_register(&ring), stages);
  }
}
