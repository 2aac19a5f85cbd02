// PagedTreeAttention for decoding with many sequences: each team of warps has separate splits.
//
//   q … attended, workspace_…   see attend_split (kernel.cu); the results have the same bits
//
// Grid (shares · ROW_CTAS, KV_HEADS): about as many CTAs as fit on the GPU. Each has a share of the
// chunks of all sequences (attention_shares.cuh), so that multiprocessors are busy both with many
// short contexts and with few long ones. A CTA has kRows rows of a sequence and one KV head; its
// teams process its splits in turn.
//
// In kernel.cu four warps share a split, which is fastest if one sequence is spread over the GPU.
// Their states are merged in shared memory after every split, and up to 2k keys a split is one tile
// per warp. Here a team processes all four tile runs of a split in sequence, and merges them. Teams
// share the remaining splits of the last round if that is faster (attention_deal.cuh). If a CTA has
// all splits of the rows, they are merged in order in shared memory, once per round of all teams.
// Otherwise the CTA that arrives last merges them from the workspaces.
//
// The kernel reads 4·WIDTH bytes per key and KV head; a CTA has 512·WIDTH·STAGES·SPLIT_TEAMS in
// flight.
#include "../_device/arrival.cuh"
#include "device/attention_chain.cuh"
#include "device/attention_deal.cuh"
#include "device/attention_held.cuh"
#include "device/attention_shares.cuh"
#include "device/config.cuh"

namespace {

static_assert(Config::kSlots > 1, "splits have workspaces");

constexpr int kSharedBytes = 16 * (kTileMemoryUnits + Running::kAll) + 4 * kParts * kPartFloats +
                             8 * kParts * kPartHeads + 16 + sizeof(Share);
static_assert(kSharedBytes <= Config::kSharedBytes, "the launch requests the layout below");

struct Memory : TileMemory {
  float4* running;  // [Running::kAll]
  float* parts;     // [kTeams][ROW_WARPS][kPartFloats]
  float2* sums;     // [kTeams][ROW_WARPS][kPartHeads]
  int* last;        // whether this CTA arrives last
  Share* share;     // the current share of this CTA
  int team, row_warp;

  __device__ __forceinline__ explicit Memory(unsigned char* shared)
      : TileMemory(shared, threadIdx.x / 32 % kTeams),
        team(threadIdx.x / 32 % kTeams),
        row_warp(threadIdx.x / 32 / kTeams) {
    running = reinterpret_cast<float4*>(end(shared));
    parts = reinterpret_cast<float*>(running + Running::kAll);
    sums = reinterpret_cast<float2*>(parts + kParts * kPartFloats);
    last = reinterpret_cast<int*>(sums + kParts * kPartHeads);
    share = reinterpret_cast<Share*>(last + 4);
  }
};

// Process this CTA's splits, those that equal `cta` modulo `ctas`, for the rows from `first` on.
// Tiles that end below slot `limit` are loaded before the previous launch has finished.
__device__ __forceinline__ void attend_share(const Inputs& in, Walk& walk, const Memory& memory,
                                             const SlotStates& slots, int cta, int ctas, int first,
                                             int limit, int* arrivals) {
  const Rows& rows = walk.rows;
  const bool has_tail = kHasTail && rows.tail_in_cta(cta, ctas);
  const TeamRows mine{memory.team, memory.row_warp * Config::kRows, has_tail, memory.tail};
  const Deal deal(rows, cta, ctas);
  TeamRing<DealtTiles> ring{memory.ring, {deal, walk, memory.team}};
  const int early = ring.start_below(walk, limit);
  pdl_wait();
  Queries queries;
  queries.tile = memory.queries + memory.row_warp * kPairs * 16 * kQueryUnits;
  load_queries(queries, memory.queries, in.q, walk, first);
  if (has_tail) walk.fetch_tail(memory.tail);
  if (kRows > 1) cp_async_commit();
  ring.start(walk, early);
  if (kRows > 1) {
    wait_but_for(Config::kStages - early);
    __syncthreads();
  }
  const Held held(memory.parts, memory.sums, memory.team * Config::kRowWarps + memory.row_warp);
  const HeldParts parts{memory.parts, memory.sums};
  Running running(memory.running);
#pragma unroll 1
  for (int round = 0; round < deal.count; round = deal.next(round)) {
    const int slot = deal.slot_of(round, memory.team);
    const int chain_from = deal.chain_from(round, memory.team);
    const int chain_to = slot < Config::kSplit ? deal.chain_to(round, memory.team) : 0;
#pragma unroll 1
    for (int chain = chain_from; chain < chain_to; ++chain) {
      States states;
      attend_chain(states, walk, ring, queries, mine, slot, chain);
      held.join(states, chain == chain_from);
    }
    const bool by_chains = deal.by_chains(round);
    if (ctas > 1 && !by_chains) {
      if (slot < Config::kSplit) {
        held.leave(slots, first + mine.first, min(Config::kRows, rows.count - mine.first), slot);
      }
      continue;
    }
    const int num_splits = min(deal.next(round), deal.count) - round;
    __syncthreads();
    if (ctas == 1) {
      running.join_round(parts, num_splits, by_chains, rows.count);
    } else {
#pragma unroll 1
      for (int i = 0; i < num_splits; ++i) {
        Running::leave_chains(parts, i * kChains, slots, first, rows.count, deal.slot(round + i));
      }
    }
    __syncthreads();
  }
  if (ctas == 1) {
    running.store(slots, first, rows.count);
    return;
  }
  int* arrived = arrivals + first * Config::kKvHeads + walk.kv_head;
  if (!is_last_of(arrived, rows.ctas(ctas), memory.last)) return;
  slots.join_rows<8>(first, rows.count, threadIdx.x, kThreads,
                     [&](int slot) { return rows.occupy(slot); });
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, Config::kCtasOfAnSm)
    attend_split_per_warp(const uint32_t* q, const uint4* k_pool, const uint4* v_pool,
                          const int* page_table, const int* row_start, const int* row_slot,
                          const int* tree_start, const int* ancestor_bits, const float* sinks,
                          const int* selected, uint2* attended, int* workspace_arrivals,
                          float2* workspace_sums, float4* workspace_values) {
  DYNAMIC_SHARED(unsigned char, shared);
  const Memory memory(shared);
  const Inputs in{q,        k_pool,     v_pool,        page_table, row_start,
                  row_slot, tree_start, ancestor_bits, sinks};
  const SlotStates slots{workspace_sums, workspace_values, sinks, attended};
  const int lane = threadIdx.x % 32, kv_head = blockIdx.y;
  const int row_cta = static_cast<int>(blockIdx.x) % Config::kRowCtas * kRows;
  const int max_ctas = static_cast<int>(gridDim.x) / Config::kRowCtas;
  const int number = static_cast<int>(blockIdx.x) / Config::kRowCtas;
  pdl_launch_dependents();
  if (Config::kHasSinks && threadIdx.x == 0) warm_l2(sinks + kv_head * Config::kGroup);
  Walk walk{k_pool, v_pool, page_table, kv_head, lane, memory.row_warp * 32 + lane};
  Share share = share_of(Lengths(row_start, tree_start), number, max_ctas);
#pragma unroll 1
  while (share.sequence < Config::kBatch) {
    if (threadIdx.x == 0) *memory.share = share;
    const int table =
        share.sequence * Config::kViews + (Config::kViews > 1 ? kv_head / Config::kShare : 0);
    walk.table = page_table + table * Config::kTable;
    walk.entries_from = -32 * kPeriod;  // matches no tile
    for (int first = share.row_begin + row_cta; first < share.row_end;
         first += Config::kRowCtas * kRows) {
      const int count = min(kRows, share.row_end - first);
      // The first row of a sequence has the lowest slot.
      const int limit = min(row_slot[share.row_begin], share.tree_start);
      walk.rows.index = -1;
      walk.open(first, count, row_slot, share.tree_start, ancestor_bits);
      if (!walk.rows.occupy_cta(share.cta, share.ctas)) continue;
      attend_share(in, walk, memory, slots, share.cta, share.ctas, first, limit,
                   workspace_arrivals);
      __syncthreads();
      // Read again from shared memory, because registers are scarce.
      share = *memory.share;
    }
    // There are more shares than CTAs if there are more sequences: each has a share at least.
    if (share.next >= share.total) break;
    __syncthreads();  // after all threads have read this share
    share = share_of(Lengths(row_start, tree_start), share.next, max_ctas);
  }
  wait_for_launches_in_front();
}
