// PagedTreeAttention over lists of slots (DSA): a CTA gathers the keys of one row and KV head.
//
//   q              bf16 [T, KV_HEADS·GROUP, WIDTH], rotated
//   k_pool, v_pool bf16 [pages, KV_HEADS, PAGE_SIZE, WIDTH]
//   page_table     i32  [B, VIEWS, TABLE]   VIEWS 1 or KV_HEADS
//   row_start      i32  [B + 1]
//   row_slot       i32  [T]
//   tree_start     i32  [B]
//   ancestor_bits  i32  [T, WORDS]
//   sinks          f32  [KV_HEADS·GROUP], null without HAS_SINKS
//   selected       i32  [T, LISTS, held]   LISTS 1 or KV_HEADS; rising, −1 behind the last
//   attended       bf16 [T, KV_HEADS·GROUP, WIDTH], out; not of rows whose list begins with −2
//   workspace_…    as attend_split's, null where SLOTS is 1
//
// Grid (CONTEXT_CTAS, KV_HEADS, T). An entry's place in its list stands for a position: tiles,
// chunks, slots and joins are those of the plain kernel (kernel.cu), so that a list of everything
// gives that kernel's bits, and a row's result depends on its list alone. A list is as a row's that
// is alone wherever the row stands: in a tree its ancestors follow in the order of their positions.
//
// Bytes: 4·WIDTH an entry and KV head, shared by its query heads: 4.3 MB for a row of GPT-OSS with
// 2116 entries, 1 µs at 4.53 TB/s. What counts is latency: entries, their pages, their keys.
#include "../_device/row_sequence.cuh"
#include "kernel.cu"

static_assert(kRows == 1 && WINDOW == 0, "one row, and what it sees is in its list");

namespace {

constexpr int kWhole = -2;

struct Gather {
  const uint4* k_pool;
  const uint4* v_pool;
  const int* table;  // of this sequence and KV head
  const int* list;
  const int* ancestors;
  int held, kv_head, lane;
  int own, tree_start;  // of the row

  // This lane's slot of a tile, −1 behind the list and where the row does not see it.
  __device__ __forceinline__ int slot_of(int tile) const {
    const int at = tile * kTile + lane, slot = at < held ? list[at] : -1;
    if (slot < tree_start) return slot <= own ? slot : -1;
    const int node = slot - tree_start;
    if (node >= 32 * WORDS) return -1;
    return static_cast<uint32_t>(ancestors[node / 32]) >> (node % 32) & 1u ? slot : -1;
  }

  // How many keys a tile has.
  __device__ __forceinline__ int entries(int tile) const {
    return __popc(__ballot_sync(kAllLanes, slot_of(tile) >= 0));
  }

  // Chunks that have entries; 1 for an empty list, whose result is zeros.
  __device__ __forceinline__ int chunks() const {
    int count = 0;
    for (int first = 0; first * kChunk < held; first += 32) {
      const int at = (first + lane) * kChunk;
      count += __popc(__ballot_sync(kAllLanes, at < held && list[at] >= 0));
    }
    return max(count, 1);
  }

  // Starts the copies of a tile's keys, and of its values right behind: those that the row sees in
  // front, zeros behind them.
  __device__ __forceinline__ void fetch(int tile, uint4* keys) const {
    const int slot = slot_of(tile);
    const bool seen = slot >= 0;
    const int page = seen ? table[slot / PAGE_SIZE] : 0;
    const int mine = seen ? (page * KV_HEADS + kv_head) * PAGE_SIZE + slot % PAGE_SIZE : -1;
    const unsigned all = __ballot_sync(kAllLanes, seen), below = (1u << lane) - 1u;
    const int place = seen ? __popc(all & below) : __popc(all) + __popc(~all & below);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int unit = i * 32 + lane, entry = unit / kUnits;
      const int source = __shfl_sync(kAllLanes, mine, entry);
      const int key = __shfl_sync(kAllLanes, place, entry);
      const int64_t from = static_cast<int64_t>(max(source, 0)) * kUnits + unit % kUnits;
      const int to = tile_unit<WIDTH>(key, unit % kUnits);
      cp_async_16_or_zero(keys + to, k_pool + from, source >= 0);
      cp_async_16_or_zero(keys + kTileUnits + to, v_pool + from, source >= 0);
    }
  }
};

// Every slot of this CTA, into the joiner. `rows` has places in the list for positions.
__device__ __forceinline__ void attend_lists(const Gather& gather, const Rows& rows,
                                             const Queries& queries, const Memory& memory,
                                             int row) {
  const Joiner& joiner = memory.joiner;
  const int chunks = rows.chunks();
  Cursor ahead{static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.x)};  // of chunks
  auto fetch_next = [&](int stage) {
    while (ahead.slot < SPLIT && ahead.tile >= chunks) {
      ahead.slot += CONTEXT_CTAS;
      ahead.tile = ahead.slot;
    }
    if (ahead.slot < SPLIT) {
      gather.fetch(ahead.tile * kKeyWarps + joiner.key_warp, memory.ring + stage * 2 * kTileUnits);
      ahead.tile += SPLIT;
    }
    cp_async_commit();
  };
#pragma unroll 1
  for (int i = 0; i < STAGES; ++i) fetch_next(i);
  States states;
  int stage = 0;
  for (int slot = blockIdx.x; slot < min(SPLIT, chunks); slot += CONTEXT_CTAS) {
    states.clear();
    for (int chunk = slot; chunk < chunks; chunk += SPLIT) {
      cp_async_wait<STAGES - 1>();
      __syncwarp();
      const int count = gather.entries(chunk * kKeyWarps + joiner.key_warp);
      const uint4* keys = memory.ring + stage * 2 * kTileUnits;
      if (count > 0) {
        states.attend(keys, keys + kTileUnits, Places::in_order(), queries, 0, count == kTile,
                      [&](int) { return Span{0, count - 1}; });
      }
      __syncwarp();
      fetch_next(stage);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    joiner.end_slot(states, rows, slot, row);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kCtas)
    attend_selected(const uint32_t* q, const uint4* k_pool, const uint4* v_pool,
                    const int* page_table, const int* row_start, const int* row_slot,
                    const int* tree_start, const int* ancestor_bits, const float* sinks,
                    const int* selected, uint2* attended, int* workspace_arrivals,
                    float2* workspace_sums, float4* workspace_values, int batch, int held) {
  DYNAMIC_SHARED(unsigned char, shared);
  const Inputs in = INPUTS;
  const Memory memory(shared, in, attended, workspace_sums, workspace_values);
  const int row = blockIdx.z, kv_head = blockIdx.y, lane = threadIdx.x % 32;
  const int64_t list = static_cast<int64_t>(row) * LISTS + (LISTS > 1 ? kv_head : 0);
  pdl_launch_dependents();
  pdl_wait();
  const int* ancestors = ancestor_bits + static_cast<int64_t>(row) * WORDS;
  Gather gather{k_pool, v_pool, page_table, selected + list * held, ancestors, held, kv_head, lane};
  const int sequence = sequence_of(row_start, row, batch);
  const int chunks = gather.chunks();
  if (gather.list[0] == kWhole || sequence >= batch) return;
  gather.own = row_slot[row];
  gather.tree_start = tree_start[sequence];
  gather.table += static_cast<int64_t>(sequence * VIEWS + (VIEWS > 1 ? kv_head : 0)) * TABLE;
  Rows rows{};
  rows.count = 1;
  rows.end = chunks * kChunk - 1;
  if (!rows.occupy_cta()) return;
  Queries queries;
  const int head = lane / 4;
  const int64_t q_head = (static_cast<int64_t>(row) * KV_HEADS + kv_head) * GROUP + head;
  queries.hold(q + q_head * (WIDTH / 2) + lane % 4, head < GROUP);
  attend_lists(gather, rows, queries, memory, row);
  if (SLOTS == 1 || chunks == 1) return;
  int* count = workspace_arrivals + static_cast<int64_t>(row) * KV_HEADS + kv_head;
  if (arrives_last(count, rows.ctas(), memory.last)) memory.joiner.join_slots(rows, row);
}
