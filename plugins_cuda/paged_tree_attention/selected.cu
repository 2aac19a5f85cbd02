// PagedTreeAttention with lists of slots (DSA): a CTA gathers the keys of one row and KV head.
//
//   q              bf16 [T, KV_HEADS·GROUP, WIDTH], rotated
//   k_pool, v_pool bf16 [pages, KV_HEADS/SHARE, PAGE_SIZE, WIDTH], with CODES e4m3
//   page_table     i32  [B, VIEWS, TABLE]   VIEWS 1 or KV_HEADS/SHARE
//   row_start      i32  [B + 1]
//   row_slot       i32  [T]
//   tree_start     i32  [B]
//   ancestor_bits  i32  [T, WORDS]
//   sinks          f32  [KV_HEADS·GROUP], null without HAS_SINKS
//   selected       i32  [T, LISTS, held]   LISTS 1 or KV_HEADS/SHARE; rising, padded with −1
//   attended       bf16 [T, KV_HEADS·GROUP, WIDTH], out; of whole rows, whose list starts with
//                  −2, only if TAKES_WHOLE is 1
//   workspace_…    see attend_split; null if SLOTS is 1
//
// Grid (CONTEXT_CTAS, KV_HEADS, T). The index of an entry in its list replaces the position. Tiles,
// chunks, splits and merges are those of the plain kernel (kernel.cu), so that a list of all slots
// gives that kernel's bits, and the result of a row depends on its list only. The list of a tree's
// row has the form of a row that is alone: its ancestors follow in the order of their positions.
//
// An entry and KV head has 4·WIDTH bytes, shared by its query heads: 4.3 MB for a row of GPT-OSS
// with 2116 entries, 1 µs at 4.53 TB/s. Memory latencies determine the time: of the row's
// description with the first entries of all tiles, of their pages, and of their keys.
#include "../_device/arrival.cuh"
#include "../_device/row_sequence.cuh"
#include "device/config.cuh"
#include "kernel.cu"

static_assert(kRows == 1 && Config::kWindow == 0, "one row, whose list has its visible keys");

namespace {

constexpr int kWhole = -2;
// Tiles of a warp whose entries are loaded together, before the row's description is available.
constexpr int kLooked = 3;

struct Gather {
  const uint4* k_pool;
  const uint4* v_pool;
  const int* table;  // of this sequence and KV head
  const int* list;
  int held, kv_head, lane, chain;
  int own, tree_start;  // of the row
  int ancestors[Config::kWords];
  int looked[kLooked];  // entries of the warp's first tiles, later their pool rows

  // Return the list's entry of this lane in the warp's tile of a chunk.
  __device__ __forceinline__ int entry(int chunk) const {
    const int at = chunk * kChunk + chain * kTile + lane;
    return at < held ? list[at] : -1;
  }

  // Whether an entry is visible to the row; it is −1 after the end of the list.
  __device__ __forceinline__ bool sees(int slot) const {
    bool seen = slot >= 0 && slot <= own;
    if (slot >= tree_start) {
      const int node = slot - tree_start;
      uint32_t bits = 0;
#pragma unroll
      for (int i = 0; i < Config::kWords; ++i) {
        bits = node / 32 == i ? static_cast<uint32_t>(ancestors[i]) : bits;
      }
      seen = bits >> (node % 32) & 1u;
    }
    return seen;
  }

  // Convert entries to pool rows, −1 for invisible ones. All pages are loaded at once.
  template <int count>
  __device__ __forceinline__ void look_up(int (&entries)[count]) const {
    bool seen[count];
    int page[count];
#pragma unroll
    for (int i = 0; i < count; ++i) {
      seen[i] = sees(entries[i]);
      page[i] = load_l2_int(table + (seen[i] ? entries[i] / Config::kPageSize : 0));
    }
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const int pool_row = pool_row_of<Config::kKvHeads, Config::kShare, Config::kPageSize>(
          page[i], kv_head, entries[i]);
      entries[i] = seen[i] ? pool_row : -1;
    }
  }

  // Start to copy a tile's keys, with its values after them: visible ones first, then zeros. Return
  // the number of visible keys.
  __device__ __forceinline__ int fetch(int chunk, uint4* keys) const {
    const int number = chunk / Config::kContextCtas;
    int own_slot = -1;
    if (number < kLooked) {
#pragma unroll
      for (int i = 0; i < kLooked; ++i) own_slot = number == i ? looked[i] : own_slot;
    } else {
      int result[1] = {entry(chunk)};
      look_up(result);
      own_slot = result[0];
    }
    const bool seen = own_slot >= 0;
    const unsigned all = __ballot_sync(kAllLanes, seen), below = (1u << lane) - 1u;
    const int place = seen ? __popc(all & below) : __popc(all) + __popc(~all & below);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int unit = i * 32 + lane, entry = unit / kUnits;
      const int source = __shfl_sync(kAllLanes, own_slot, entry);
      const int key = __shfl_sync(kAllLanes, place, entry);
      const int64_t from = static_cast<int64_t>(max(source, 0)) * kUnits + unit % kUnits;
      const int to = tile_unit<kCacheWords>(key, unit % kUnits);
      cp_async_16_or_zero(keys + to, k_pool + from, source >= 0);
      cp_async_16_or_zero(keys + kTileUnits + to, v_pool + from, source >= 0);
    }
    return __popc(all);
  }
};

// The numbers of keys of the tiles in flight, the oldest first.
struct Counts {
  int of[Config::kStages] = {};

  __device__ __forceinline__ void push(int count) {
#pragma unroll
    for (int i = 0; i + 1 < Config::kStages; ++i) of[i] = of[i + 1];
    of[Config::kStages - 1] = count;
  }
};

// Process every split of this CTA. The positions of `rows` are indices of the list.
__device__ __forceinline__ void attend_lists(const Gather& gather, const Rows& rows,
                                             const Queries& queries, const Memory& memory,
                                             int row) {
  const Joiner& joiner = memory.joiner;
  const int chunks = rows.chunks();
  Cursor ahead{0, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.x)};  // of chunks
  Counts counts;
  auto fetch_next = [&](int stage) {
    while (ahead.slot < Config::kSplit && ahead.tile >= chunks) {
      ahead.slot += Config::kContextCtas;
      ahead.tile = ahead.slot;
    }
    int count = 0;
    if (ahead.slot < Config::kSplit) {
      count = gather.fetch(ahead.tile, memory.ring + stage * 2 * kTileUnits);
      ahead.tile += Config::kSplit;
    }
    counts.push(count);
    cp_async_commit();
  };
#pragma unroll 1
  for (int i = 0; i < Config::kStages; ++i) fetch_next(i);
  States states;
  int stage = 0;
  for (int slot = blockIdx.x; slot < min(Config::kSplit, chunks); slot += Config::kContextCtas) {
    states.clear();
    for (int chunk = slot; chunk < chunks; chunk += Config::kSplit) {
      cp_async_wait<Config::kStages - 1>();
      __syncwarp();
      const int count = counts.of[0];
      const uint4* keys = memory.ring + stage * 2 * kTileUnits;
      if (count > 0) {
        states.attend(keys, keys + kTileUnits, Places::in_order(), queries, 0, count == kTile,
                      [&](int) { return Span{0, count - 1}; });
      }
      __syncwarp();
      fetch_next(stage);
      stage = stage + 1 == Config::kStages ? 0 : stage + 1;
    }
    joiner.end_slot(states, rows, slot, row);
  }
}

// Merge the splits of a row in the CTA that arrives last of those that share it.
__device__ __forceinline__ void join_last(const Rows& rows, const Memory& memory, int* arrivals,
                                          int row) {
  if (Config::kSlots == 1 || rows.chunks() == 1) return;
  int* count = arrivals + static_cast<int64_t>(row) * Config::kKvHeads + blockIdx.y;
  if (is_last_of(count, rows.ctas(Config::kContextCtas), memory.last))
    memory.joiner.join_slots(rows, row);
}

// Process a whole row as the plain kernel processes a row that does not share its keys.
__device__ __forceinline__ void attend_whole_row(const Inputs& in, const Memory& memory,
                                                 const int* table, int tree_start, int row,
                                                 int* arrivals) {
  const Joiner& joiner = memory.joiner;
  const int lane = threadIdx.x % 32;
  Walk walk{in.k_pool, in.v_pool, table, static_cast<int>(blockIdx.y), lane, lane};
  walk.rows.open(row, 1, in.row_slot, tree_start, in.ancestor_bits);
  if (!walk.rows.occupy_cta(context_cta(), Config::kContextCtas)) return;
  walk.look_up(walk.first_tile(context_cta(), joiner.chain));
  attend_slots(in, walk, memory, row, 0);
  join_last(walk.rows, memory, arrivals, row);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, Config::kCtasOfAnSm)
    attend_selected(const uint32_t* q, const uint4* k_pool, const uint4* v_pool,
                    const int* page_table, const int* row_start, const int* row_slot,
                    const int* tree_start, const int* ancestor_bits, const float* sinks,
                    const int* selected, uint2* attended, int* workspace_arrivals,
                    float2* workspace_sums, float4* workspace_values, int batch, int held) {
  DYNAMIC_SHARED(unsigned char, shared);
  const Inputs in = INPUTS;
  const Memory memory(shared, in, attended, workspace_sums, workspace_values);
  const int row = blockIdx.z, kv_head = blockIdx.y, lane = threadIdx.x % 32;
  const int64_t number = static_cast<int64_t>(row) * Config::kLists +
                         (Config::kLists > 1 ? kv_head / Config::kShare : 0);
  const int* list = selected + number * held;
  pdl_launch_dependents();
  pdl_wait();
  const FirstSequences sequences(row_start, batch, tree_start, tree_start);
  Gather gather{k_pool, v_pool, page_table, list, held, kv_head, lane, memory.joiner.chain};
  const int head_entry = lane * kChunk < held ? list[lane * kChunk] : -1;
#pragma unroll
  for (int i = 0; i < kLooked; ++i) {
    gather.looked[i] = gather.entry(static_cast<int>(blockIdx.x) + i * Config::kContextCtas);
  }
  gather.own = row_slot[row];
#pragma unroll
  for (int i = 0; i < Config::kWords; ++i) {
    gather.ancestors[i] = ancestor_bits[static_cast<int64_t>(row) * Config::kWords + i];
  }
  Queries queries;
  const int head = lane / 4;
  const int64_t q_head =
      (static_cast<int64_t>(row) * Config::kKvHeads + kv_head) * Config::kGroup + head;
  queries.hold(q + q_head * (Config::kWidth / 2) + query_lane(lane % 4), head < Config::kGroup);
  const RowSequence sequence = sequences.of_row(row, row_start, batch, tree_start, tree_start);
  if (sequence.index >= batch) return;
  gather.table += static_cast<int64_t>(sequence.index * Config::kViews +
                                       (Config::kViews > 1 ? kv_head / Config::kShare : 0)) *
                  Config::kTable;
  if (__shfl_sync(kAllLanes, head_entry, 0) == kWhole) {
    if (Config::kTakesWhole) {
      attend_whole_row(in, memory, gather.table, sequence.start, row, workspace_arrivals);
    }
    return;
  }
  // The number of chunks with entries; 1 for an empty list, whose result is zero.
  int chunks = __popc(__ballot_sync(kAllLanes, head_entry >= 0));
#pragma unroll 1
  for (int first = 32; first * kChunk < held; first += 32) {
    const int at = (first + lane) * kChunk;
    chunks += __popc(__ballot_sync(kAllLanes, at < held && list[at] >= 0));
  }
  gather.tree_start = sequence.start;
  Rows rows{};
  rows.count = 1;
  rows.end = max(chunks, 1) * kChunk - 1;
  if (!rows.occupy_cta(static_cast<int>(blockIdx.x), Config::kContextCtas)) return;
  gather.look_up(gather.looked);
  attend_lists(gather, rows, queries, memory, row);
  join_last(rows, memory, workspace_arrivals, row);
}
