// PagedTreeAttention for decoding where sequences have several rows, as trees do, or many, as when
// SpecPV feeds a buffer again: by wgmma, with the bits of kernel.cu.
//
//   q … ancestor_bits  as attend_split's (kernel.cu); heads are 64 or 128 wide, WINDOW is 0
//   workspace_sums    f32  [T, KV_HEADS, SLOTS, GROUP, 2], out, of slots that rows see
//   workspace_values  f32  [T, KV_HEADS, SLOTS, GROUP, WIDTH], out, likewise
//
// Grid (SLOTS, KV_HEADS, shares of the row tiles): about as many CTAs as the GPU holds, each with a
// slot of every sequence's context, so that their lengths do not matter. A CTA takes row tile by
// row tile, each up to 8·ROW_GROUPS rows of a sequence (16·ROW_GROUPS where a KV head has up to 4
// query heads); each reads keys anew, which is not what it waits for; sequences of up to FEW_ROWS
// are another kernel's. WARPGROUPS (4, or 2 of wide heads, whose sums take twice the registers)
// take 8 rows × 8 heads or 16 × 4 each, or, with fewer rows, chains of the slot: ROW_GROUPS of them
// share a chain, and WARPGROUPS / ROW_GROUPS chains are walked at once. Another copies tiles of 32
// keys and values into a ring, and a warp of the last looks up what rows come next: so keys of the
// next rows arrive while the others end. The scores of a tile run on the tensor cores together with
// the values of the one before (FlashAttention-3, arXiv 2407.08608, section 3.2), and one
// warpgroup's softmax beside the others' products.
//
// Why the bits are those of kernel.cu: a chain's tiles are taken one by one by that kernel's steps,
// and wgmma's sums of k16 products have the bits of mma's (measured: 3.7 million sums over three
// distributions). The chains of a slot join in order; join_slots (join_slots.cu) does the rest.
//
// A tile of width 64 is 8 KB, of which a multiprocessor reads 19 B a cycle: 420 cycles. For each
// row group it takes 128 cycles of the tensor cores and 145 for its exponentials. Of width 128 it
// is twice as much, but for the exponentials.
#include "device/chain_state.cuh"
#include "device/config.cuh"

namespace {

constexpr int kGroups = Config::kWarpgroups;
constexpr int kGroupWarps = 4, kGroupThreads = 32 * kGroupWarps;
constexpr int kGroupRows = kGroupWarps * kWarpRows;
constexpr int kRows = Config::kRowGroups * kGroupRows;
constexpr int kHolders = Config::kRowGroups * kGroupThreads;  // threads with sums of their own
constexpr int kThreads = (kGroups + 2) * kGroupThreads;
constexpr int kConsumerRegisters = Config::kWidth == 64 ? 104 : 208;
constexpr int kCopyRegisters = Config::kWidth == 64 ? 32 : 48, kOpenRegisters = kCopyRegisters;
static_assert(kCopyWarps == kGroupWarps, "a warpgroup copies");
static_assert(Config::kSlots > 1, "slots have workspaces");
static_assert(16 * (Config::kStages * 2 * kTileUnits + kHolders * (Config::kWidth / 8 + 1)) ==
                  Config::kSharedBytes,
              "the launch gives as much as the stages and Held take");
static_assert(Config::kRowGroups * kChainsAtOnce == kGroups,
              "every warpgroup has rows and a chain");
static_assert(Config::kStages / kChainsAtOnce > 2,
              "a chain has a stage for the tile that is waited for");
static_assert(kGroups * kConsumerRegisters + kCopyRegisters + kOpenRegisters <=
                  (kGroups + 2) * registers_at_entry(kThreads),
              "no more registers than there are");

// A row tile, opened; one without rows is behind the last.
struct Opened {
  unsigned turn;  // how many were opened before
  int slot;       // of the context, for this CTA
  int first;      // row of the launch
  ManyRow all[kRows];
  ManyRows rows;
  int full_last[Config::kRowGroups];  // shared positions up to here are seen by all rows of a
                                      // warpgroup
};

constexpr int kAhead = 4;  // row tiles that are opened at once

// In shared memory, where their readers look things up again: registers are short.
struct Openings {
  Opened at[kAhead];
  Mbarrier full[kAhead], empty[kAhead];
};

// From row tile to row tile a CTA's slots go on by this: it has keys of short contexts as often as
// others have.
constexpr int kSlotStep = 5;

// A warpgroup that attends for its 8 rows, one chain after the other.
struct Consumer {
  Chain chain;
  StageRing& ring;
  LowMatrix stages;
  RingCount& place;
  const ManyRows& rows;
  int warp_row;   // the first of this warp's
  int full_last;  // shared positions up to here are seen by all rows of the warpgroup

  __device__ __forceinline__ LowMatrix keys(int slot) const {
    return stages + slot * 2 * kTileUnits;
  }
  __device__ __forceinline__ LowMatrix values(int slot) const {
    return stages + (slot * 2 * kTileUnits + kTileUnits);
  }

  // The stage of the tile that stands so many in front of the next.
  __device__ __forceinline__ int behind(int tiles) const {
    return RingCount{place.passed - tiles * kChainsAtOnce}.slot();
  }

  __device__ __forceinline__ void give_back(int slot) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&ring.empty[slot]);
  }

  // Waits for the next tile; false behind the last. Two are kept meanwhile.
  __device__ __forceinline__ bool await(Tiles& tiles) {
    const bool more = tiles.advance();
    if (more) {
      mbarrier_wait(&ring.full[place.slot()], place.parity());
      fence_async_shared();
    }
    return more;
  }

  // Whether only rows of other warpgroups see a tile.
  __device__ __forceinline__ bool passes(const Tiles& tiles) const {
    return Config::kRowGroups > 1 && tiles.own >= 0 &&
           tiles.own / kGroupRows != warp_row / kGroupRows;
  }

  // Ends the scores of a tile, and makes them weights; what the values are to be multiplied by.
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

  // Times 1 changes nothing, which is what most tiles of a long chain multiply by.
  __device__ __forceinline__ void scale_values(const float (&by)[kHalves]) {
    if (!__any_sync(kAllLanes, by[0] != 1.0f || by[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < Config::kWidth / 2; ++i) chain.values[i / 4][i % 4] *= by[i % 4 / 2];
  }

  // The sums of a chain. Within the loop the wait for the next tile stands in front of the values',
  // which ptxas would move in front of the weights.
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

  // What a warpgroup without rows does: it gives all tiles back.
  __device__ __forceinline__ void pass(Tiles& tiles) {
    chain.clear();
    while (await(tiles)) {
      place.passed += kChainsAtOnce;
      give_back(behind(1));
    }
  }
};

// What a launch says of its rows.
struct Inputs {
  const uint32_t* q;
  const int* row_start;
  const int* row_slot;
  const int* tree_start;
  const int* ancestor_bits;
};

// A row tile: `count` rows of a sequence from row `first` of the launch on, by one warp.
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

// The opening warp: this CTA's row tiles, as far ahead as there is room, and one without rows.
__device__ __forceinline__ void open_all(const Inputs& in, Openings& openings) {
  const auto next = [&](unsigned turn) -> Opened& {
    mbarrier_wait(&openings.empty[turn % kAhead], turn / kAhead % 2 ^ 1);
    return openings.at[turn % kAhead];
  };
  const auto tell = [&](unsigned turn) {
    __syncwarp();
    if (thread_anew() % 32 == 0) mbarrier_arrive(&openings.full[turn % kAhead]);
  };
  unsigned number = 0, turn = 0;  // row tiles of the launch, and of this CTA
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

// What another warp goes through: the row tiles, as they are opened.
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

// One of the other warpgroups: of every row tile its rows' sums over its chains.
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
  DYNAMIC_SHARED(uint4, stages);  // [STAGES][keys, values], from a multiple of 1024, and Held
  __shared__ StageRing ring;
  __shared__ Mbarrier joined[Config::kRowGroups][kChains];  // chains of a row group, in their turn
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
