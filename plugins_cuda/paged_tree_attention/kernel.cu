// PagedTreeAttention for decoding, verification and drafting, with splits of the context.
//
//   q              bf16 [T, KV_HEADS·GROUP, WIDTH], rotated
//   k_pool, v_pool bf16 [pages, KV_HEADS/SHARE, PAGE_SIZE, WIDTH], with CODES e4m3
//   page_table     i32  [B, VIEWS, TABLE]   VIEWS 1 or KV_HEADS/SHARE
//   row_start      i32  [B + 1]
//   row_slot       i32  [T]
//   tree_start     i32  [B]
//   ancestor_bits  i32  [T, WORDS]
//   sinks          f32  [KV_HEADS·GROUP], null without HAS_SINKS
//   selected       not used: null
//   attended       bf16 [T, KV_HEADS·GROUP, WIDTH], out
//   workspace_arrivals  i32  [T, KV_HEADS], zeros before and after
//   workspace_sums      f32  [T, KV_HEADS, SLOTS, GROUP, 2]
//   workspace_values    f32  [T, KV_HEADS, SLOTS, GROUP, WIDTH]
//
// Grid (CONTEXT_CTAS·ROW_CTAS, KV_HEADS, B). A CTA has kRows rows of a sequence, one KV head, and
// the splits c, c + CONTEXT_CTAS, … of SPLIT, where c = x / ROW_CTAS; it returns if it has no keys.
// Within a split each team processes its tile run (attention_walk.cuh) with separate softmax
// states. The states of the tile runs are merged in order, and then those of the splits in order.
// The merge of the splits is done by the CTA that arrives last or, with MEETS (several rows, and
// all CTAs are resident), by all CTAs with splits of the rows, a part of the results each. No sum
// depends on other rows of the launch, on the grid, or on the slots of the tree's nodes.
//
// S = Q·Kᵀ has two rows × 8 heads, or four × 4, as the 16 rows of an mma. With more query heads, a
// KV head of the pools counts as SHARE of KV_HEADS, which read the same keys. P·V follows with P in
// registers. The kernel reads 4·WIDTH bytes per key and KV head; a CTA's ring has 512·WIDTH·STAGES
// bytes in flight. With CODES there are half as many bytes, and the operands are f16.
//
// Up to 1k keys, latency dominates. The descriptions of rows and the page table are loaded at once,
// before griddepcontrol.wait. The load assumes that all sequences have equally many rows; otherwise
// it is repeated. Tiles that the previous launch does not write are loaded before the wait, too
// (launches.py: reads_early). It writes this launch's rows, none of which is below the first of its
// sequence. L1 has no older data, because it is invalidated when a grid starts.
#include "device/attention_chain.cuh"
#include "device/attention_join.cuh"
#include "device/config.cuh"

namespace {

static_assert((Config::kContextCtas & (Config::kContextCtas - 1)) == 0,
              "splits are distributed with masks");

// CTAs of different rows that read the same keys have adjacent indices. They run at the same time,
// so that L2 serves all but one.
__device__ __forceinline__ int context_cta() {
  return static_cast<int>(blockIdx.x) / Config::kRowCtas;
}

constexpr int kSharedBytes =
    16 * kTileMemoryUnits + 4 * kParts * kPartFloats + 8 * kParts * kPlaces + 16;
static_assert(kSharedBytes <= Config::kSharedBytes, "the launch requests the layout below");

struct Memory : TileMemory {
  int* last;  // whether this CTA arrives last
  Joiner joiner;

  __device__ __forceinline__ Memory(unsigned char* shared, const Inputs& in, uint2* attended,
                                    float2* slot_sums, float4* slot_values)
      : TileMemory(shared, threadIdx.x / 32 % kChains) {
    const int warp = threadIdx.x / 32;
    joiner.parts = reinterpret_cast<float*>(end(shared));
    joiner.part_sums = reinterpret_cast<float2*>(joiner.parts + kParts * kPartFloats);
    last = reinterpret_cast<int*>(joiner.part_sums + kParts * kPlaces);
    joiner.slots = {slot_sums, slot_values, in.sinks, attended};
    joiner.chain = warp % kChains;
    joiner.row_warp = warp / kChains;
  }
};

// A position in a team's list of shared tiles; after the last of a split, `tile` is not visible.
struct Cursor {
  int chain, slot, tile;

  // Move from the end of a split to the next one with tiles, or past the last split.
  __device__ __forceinline__ void settle(const Walk& walk) {
    while (slot < Config::kSplit && !walk.shares(tile)) {
      slot += Config::kContextCtas;
      tile = walk.first_tile(slot, chain);
    }
  }
};

// Process every split of this CTA. Tiles that end below slot ``limit`` are loaded before the
// previous launch has finished; everything else waits for it.
__device__ __forceinline__ void attend_slots(const Inputs& in, Walk& walk, const Memory& memory,
                                             int first, int limit) {
  const Joiner& joiner = memory.joiner;
  const Rows& rows = walk.rows;
  const bool has_tail = kHasTail && rows.tail_in_cta(context_cta(), Config::kContextCtas);
  const TeamRows mine{joiner.chain, joiner.row_warp * Config::kRows, has_tail, memory.tail};
  const int slot_from = context_cta();
  TeamRing<Cursor> ring{memory.ring,
                        {joiner.chain, slot_from, walk.first_tile(slot_from, joiner.chain)}};
  const int early = ring.start_below(walk, limit);
  pdl_wait();
  Queries queries;
  queries.tile = memory.queries + joiner.row_warp * kPairs * 16 * kQueryUnits;
  load_queries(queries, memory.queries, in.q, walk, first);
  if (has_tail) walk.fetch_tail(memory.tail);
  if (kRows > 1) cp_async_commit();
  ring.start(walk, early);
  States states;
  if (kRows > 1) {
    wait_but_for(Config::kStages - early);
    __syncthreads();
  }
  for (int slot = slot_from; slot < Config::kSplit; slot += Config::kContextCtas) {
    if (!rows.occupy(slot)) continue;
    attend_chain(states, walk, ring, queries, mine, slot, joiner.chain);
    joiner.end_slot(states, rows, slot, first);
  }
}

__device__ __forceinline__ void attend(const Inputs& in, uint2* attended, int* arrivals,
                                       float2* slot_sums, float4* slot_values) {
  DYNAMIC_SHARED(unsigned char, shared);
  const Memory memory(shared, in, attended, slot_sums, slot_values);
  const Joiner& joiner = memory.joiner;
  const int sequence = blockIdx.z, lane = threadIdx.x % 32;
  const int kv_head = blockIdx.y, row_cta = static_cast<int>(blockIdx.x) % Config::kRowCtas * kRows;
  const int view = sequence * Config::kViews + (Config::kViews > 1 ? kv_head / Config::kShare : 0);
  const int guess_row = row_cta + min(lane % kRowLanes, kRows - 1);
  const int guess =
      min(sequence * Config::kSequenceRows + min(guess_row, Config::kSequenceRows - 1),
          Config::kLaunchRows - 1);
  Walk walk{in.k_pool, in.v_pool, in.page_table + view * Config::kTable,
            kv_head,   lane,      joiner.row_warp * 32 + lane};
  pdl_launch_dependents();
  const int begin = in.row_start[sequence], stop = in.row_start[sequence + 1];
  const int tree_start = in.tree_start[sequence];
  walk.rows.load(guess, in.row_slot, in.ancestor_bits);
  if (Config::kPageSize % kTile == 0) {
    const int slot = __shfl_sync(kAllLanes, walk.rows.slot, 0);
    walk.look_up(walk.first_tile_of(slot, context_cta(), joiner.chain));
  }
  if (threadIdx.x == 0) {
    if (Config::kHasSinks) warm_l2(in.sinks + kv_head * Config::kGroup);
    if (Config::kSlots > 1) warm_l2(arrivals + guess * Config::kKvHeads + kv_head);
  }
  // The first row of a sequence has the lowest slot.
  const int limit = begin < stop ? min(in.row_slot[begin], tree_start) : 0;
  for (int first = begin + row_cta; first < stop; first += Config::kRowCtas * kRows) {
    walk.open(first, min(kRows, stop - first), in.row_slot, tree_start, in.ancestor_bits);
    if (!walk.rows.occupy_cta(context_cta(), Config::kContextCtas)) continue;
    attend_slots(in, walk, memory, first, limit);
    const bool joins = Config::kSlots > 1 && walk.rows.chunks() > 1;
    int* count = arrivals + first * Config::kKvHeads + kv_head;
    if (joins && Config::kMeets) {
      joiner.join_together(walk.rows, first, context_cta(), count, memory.last);
    } else if (joins && is_last_of(count, walk.rows.ctas(Config::kContextCtas), memory.last)) {
      joiner.join_slots(walk.rows, first);
    }
    walk.rows.index = -1;
    __syncthreads();
  }
  wait_for_launches_in_front();
}

}  // namespace

#define INPUTS \
  {q, k_pool, v_pool, page_table, row_start, row_slot, tree_start, ancestor_bits, sinks}

// Only one of the two has a body: a launch with one split has no workspaces.
extern "C" __global__ void __launch_bounds__(kThreads, Config::kCtasOfAnSm)
    attend_split(const uint32_t* q, const uint4* k_pool, const uint4* v_pool, const int* page_table,
                 const int* row_start, const int* row_slot, const int* tree_start,
                 const int* ancestor_bits, const float* sinks, const int* selected, uint2* attended,
                 int* workspace_arrivals, float2* workspace_sums, float4* workspace_values) {
  if constexpr (Config::kSlots > 1) {
    attend(INPUTS, attended, workspace_arrivals, workspace_sums, workspace_values);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, Config::kCtasOfAnSm)
    attend_whole(const uint32_t* q, const uint4* k_pool, const uint4* v_pool, const int* page_table,
                 const int* row_start, const int* row_slot, const int* tree_start,
                 const int* ancestor_bits, const float* sinks, const int* selected,
                 uint2* attended) {
  if constexpr (Config::kSlots == 1) attend(INPUTS, attended, nullptr, nullptr, nullptr);
}
