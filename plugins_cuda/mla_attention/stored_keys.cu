// MlaAttention with rebuilt keys for sequences of several rows, first launch: keys of visible
// tokens.
//
//   c_pool         bf16 [pages, 1, PAGE_SIZE, ENTRY]
//   w_k, b_k, cos, sin, page_table, row_start, row_slot, tree_start, ancestor_bits, page_position
//                  see kernel.cu
//   selected       i32  [T, 1, held], null without lists; a list that starts with −2 is that of a
//                  whole row. Keys are rebuilt only for sequences with a whole row.
//   workspace_keys bf16, out: stored tiles (stored_tiles.cuh)
//
// Grid (CTAs over tiles, feature groups). One warpgroup copies latents and rotary tables to a ring.
// Two hold the CTA's part of w_k in registers and rebuild 64 features each (latent_keys.cuh), as
// attend_latents does, so that keys have the same bits. A token takes 2·ENTRY·KV_HEADS·WIDTH
// operations once. attend_stored reads its keys for every few rows.
#include "../_device/ptx_ring.cuh"
#include "device/config.cuh"
#include "device/latent_copy.cuh"
#include "device/stored_tiles.cuh"
#include "device/warpgroup_registers.cuh"

namespace {

constexpr int kThreads = kLatentThreads + kCopyThreads;
constexpr int kCopyBarrier = 3;  // of the copying warpgroup

constexpr int kSharedBytes =
    16 * (Config::kStages * (kStageUnits + kTableUnits + 1) + kLoadUnits + kWaitingUnits) + 8;
static_assert(kSharedBytes <= Config::kSharedBytes, "the launch requests the layout below");

struct Memory {
  uint4* ring;         // [STAGES][kStageUnits]
  uint4* tables;       // [STAGES][kTableUnits]
  uint4* space;        // through which weights are loaded
  uint4* waiting;      // of KeyMaker
  Mbarrier* full;      // [STAGES]
  Mbarrier* empty;     // [STAGES]
  Mbarrier* measured;  // extents are available

  __device__ __forceinline__ explicit Memory(unsigned char* shared) {
    ring = reinterpret_cast<uint4*>(shared);
    tables = ring + Config::kStages * kStageUnits;
    space = tables + Config::kStages * kTableUnits;
    waiting = space + kLoadUnits;
    full = reinterpret_cast<Mbarrier*>(waiting + kWaitingUnits);
    empty = full + Config::kStages;
    measured = empty + Config::kStages;
  }

  __device__ __forceinline__ void open_barriers() const {
    for (int i = 0; i < Config::kStages; ++i) {
      mbarrier_init(full + i, kCopyThreads);
      mbarrier_init(empty + i, kLatentThreads / 32);
    }
    mbarrier_init(measured, kCopyThreads);
    mbarrier_init_fence();
  }
};

// The extents of the launch's rows, in shared memory.
struct Extents {
  int shared_end[Config::kBatch];     // of a sequence's shared tiles, −1 if there are none
  int own_last[Config::kLaunchRows];  // of a row's separate tiles, −1 if there are none
};

struct Inputs {
  const uint4* c_pool;
  const uint4* cos;
  const uint4* sin;
  RowInputs rows;
  const int* selected;
  const int* page_position;
  int held;

  // The copying warpgroup calls it. A sequence is processed completely if one of its rows is whole.
  __device__ __forceinline__ void measure(Extents& extents) const {
    const int lane = copy_thread() % 32;
    for (int sequence = copy_thread() / 32; sequence < Config::kBatch;
         sequence += kCopyThreads / 32) {
      const int begin = rows.row_start[sequence], stop = rows.row_start[sequence + 1];
      bool whole = false;
      for (int row = begin + lane; row < stop; row += 32) {
        whole = whole || sees_everything(selected, held, row);
      }
      whole = __any_sync(kAllLanes, whole);
      int end = -1;
      for (int row = begin + lane; row < stop; row += 32) {
        const RowView view = rows.view(sequence, row);
        extents.own_last[row] = whole ? view.last : -1;
        if (whole) end = max(end, shared_last_of(view));
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        end = max(end, __shfl_xor_sync(kAllLanes, end, step));
      }
      if (lane == 0) extents.shared_end[sequence] = end;
    }
    named_barrier_sync(kCopyBarrier, kCopyThreads);
  }
};

using Walk = WalkOf<StoredRows<1>>;

// Call use(walk, at, place) for each of the CTA's tiles. Complete warps of any warpgroup call it.
template <class Use>
__device__ __forceinline__ void for_tiles(const Inputs& in, const Extents& extents,
                                          const Use& use) {
  const int ctas = static_cast<int>(gridDim.x), cta = static_cast<int>(blockIdx.x);
  Walk walk;
  int turn = cta;  // the next shared tile of this CTA
  for (int sequence = 0; sequence < Config::kBatch; ++sequence) {
    const int shared_end = extents.shared_end[sequence];
    const int begin = in.rows.row_start[sequence], stop = in.rows.row_start[sequence + 1];
    const int start = in.rows.tree_start[sequence];
    walk.table = in.rows.page_table + static_cast<int64_t>(sequence) * Config::kTable;
    walk.begins = Config::kViewed
                      ? in.page_position + static_cast<int64_t>(sequence) * Config::kTable
                      : nullptr;
    const auto pass = [&](const TileCursor& at, int row) {
      use(walk, at, stored_tile(sequence, row, at, start, blockIdx.y));
    };
    walk.rows.shared_end = shared_end;
    walk.rows.tree_start = start;
    const int tiles = (shared_end + kTile) / kTile;
    for (; turn < tiles; turn += ctas) pass({0, turn}, begin);
    turn -= tiles;
    for (int row = begin; row < stop; ++row) {
      const int last = extents.own_last[row], first = start / kTile;
      walk.rows.last[0] = last;
      walk.rows.bits = in.rows.bits(row);
      for (int tile = first; tile * kTile <= last; ++tile) {
        if ((row * Config::kOwnTiles + tile - first) % ctas == cta) pass({1, tile}, row);
      }
    }
  }
}

// The copying warpgroup.
__device__ __forceinline__ void copy_tiles(const Inputs& in, const Extents& extents,
                                           const Memory& memory) {
  int filled = 0;
  for_tiles(in, extents, [&](const Walk& walk, const TileCursor& at, int64_t) {
    const int from = at.tile * kTile, stage = filled % Config::kStages,
              round = filled / Config::kStages;
    TileCopy copy;
    copy.look_up(in.c_pool, [&](int token) { return walk.entry_at(from + token, at); });
    if (round > 0) mbarrier_wait(memory.empty + stage, (round + 1) % 2);
    fetch_tables<kCopyThreads>(in.cos, in.sin, Config::kPositions,
                               memory.tables + stage * kTableUnits,
                               [&](int token) { return walk.position_of(from + token); });
    start_copies(copy, memory.ring + stage * kStageUnits, 0, kEntryPanels);
    cp_async_arrive(memory.full + stage);
    ++filled;
  });
}

// The two rebuilding warpgroups. ``load`` loads the weights of the maker.
template <class Load>
__device__ __forceinline__ void rebuild(const Inputs& in, const Extents& extents,
                                        const Memory& memory, KeyMaker& maker, bool loaded,
                                        const Load& load, uint4* stored) {
  const int lane = thread_index() % 32;
  int num_rebuilt = 0;
  for_tiles(in, extents, [&](const Walk&, const TileCursor&, int64_t place) {
    if (!loaded) load();
    loaded = true;
    const int stage = num_rebuilt % Config::kStages;
    mbarrier_wait(memory.full + stage, num_rebuilt / Config::kStages % 2);
    fence_async_shared();
    maker.start(memory.ring + stage * kStageUnits);
    maker.wait();
    uint2* keys = reinterpret_cast<uint2*>(stored + place) +
                  (KeyMaker::warpgroup() * kGroupHeads + KeyMaker::group_head()) * (kTile / 8) *
                      kHeadTiles * 32;
    const int key_tile = thread_index() / 32 % 4 % kHeadTiles;
    maker.finish(reinterpret_cast<const float*>(memory.tables + stage * kTableUnits),
                 [&](int n, uint32_t low, uint32_t high) {
                   keys[(n * kHeadTiles + key_tile) * 32 + lane] =
                       make_uint2(transpose_8x8(low), transpose_8x8(high));
                 });
    __syncwarp();
    if (lane == 0) mbarrier_arrive(memory.empty + stage);
    ++num_rebuilt;
  });
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    rebuild_keys(const uint4* c_pool, const uint4* w_k, const uint16_t* b_k, const uint4* cos,
                 const uint4* sin, const int* page_table, const int* row_start, const int* row_slot,
                 const int* tree_start, const int* ancestor_bits, const int* selected,
                 const int* page_position, uint4* workspace_keys, int held) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ Extents extents;
  const Memory memory(shared);
  const Inputs in{c_pool,     cos,           sin,      page_table,    row_start, row_slot,
                  tree_start, ancestor_bits, selected, page_position, held};
  pdl_launch_dependents();
  if (thread_index() == 0) memory.open_barriers();
  __syncthreads();
  if (thread_index() < kLatentThreads) {
    registers_set<kThreads, Config::kKeyRegisters>();
    KeyMaker maker;
    const auto load = [&] { maker.load(w_k, b_k, blockIdx.y, memory.space, memory.waiting); };
    // Most launches with lists rebuild nothing.
    const bool early = selected == nullptr;
    if (early) load();
    pdl_wait();
    mbarrier_wait(memory.measured, 0);
    rebuild(in, extents, memory, maker, early, load, workspace_keys);
  } else {
    registers_set<kThreads, Config::kCopyRegisters>();
    pdl_wait();
    in.measure(extents);
    mbarrier_arrive(memory.measured);
    copy_tiles(in, extents, memory);
  }
}
