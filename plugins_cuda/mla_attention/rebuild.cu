// MlaAttention in prefill, first launch: keys and values of the tokens visible to the chunk.
//
//   c_pool         bf16 [pages, 1, PAGE_SIZE, ENTRY]
//   w_k, w_v       bf16 [ENTRY, KV_HEADS, WIDTH], constant
//   b_k, b_v       bf16 [KV_HEADS, WIDTH], constant; null without HAS_BIAS
//   cos, sin       f32  [POSITIONS, WIDTH/2], constant
//   page_table     i32  [BATCH, 1, TABLE]
//   row_start, row_slot, tree_start, ancestor_bits   see kernel.cu
//   workspace_keys, workspace_values  bf16 [pages, KV_HEADS, PAGE_SIZE, WIDTH], out, for visible
//                  pages
//
// Grid (CTAs over tiles, 2 · feature groups: keys, then values). A prompt chunk has many rows, so
// each latent is rebuilt once for all of them. The kernel of plain caches
// (paged_tree_attention/prefill.cu) then attends to the results. The workspaces hold one layer's
// keys and values. A token takes 2·ENTRY·KV_HEADS·WIDTH operations for its keys, and as many for
// its values.
#include "device/config.cuh"
#include "device/latent_keys.cuh"

namespace {

static_assert(kLoadUnits <= 2 * kStageUnits, "weights pass through the ring");

struct Inputs {
  const uint4* c_pool;
  const uint4* cos;
  const uint4* sin;
  const int* row_slot;
  const int* ancestor_bits;
};

// Return the slots that any row of a sequence attends to; all threads call it.
__device__ __forceinline__ Span seen_slots(const Inputs& in, int begin, int stop, int tree_start,
                                           int* bounds) {
  if (threadIdx.x == 0) bounds[0] = kNowhere, bounds[1] = -1;
  __syncthreads();
  for (int row = begin + static_cast<int>(threadIdx.x); row < stop; row += kLatentThreads) {
    const int slot = in.row_slot[row];
    const RowView view = view_of<Config::kWords, Config::kWindow>(
        slot, tree_start, in.ancestor_bits + static_cast<int64_t>(row) * Config::kWords);
    atomicMin(bounds, view.first);
    atomicMax(bounds + 1, slot);
  }
  __syncthreads();
  const Span seen{bounds[0], bounds[1]};
  __syncthreads();
  return seen;
}

// Return the position of a slot; in the tree it follows from the ancestors of any row with it.
__device__ __forceinline__ int position_of(const Inputs& in, int begin, int stop, int tree_start,
                                           int slot) {
  const int bit = slot - tree_start;
  if (bit < 0 || bit >= 32 * Config::kWords) return slot;
  for (int row = begin; row < stop; ++row) {
    const int* bits = in.ancestor_bits + static_cast<int64_t>(row) * Config::kWords;
    if (static_cast<uint32_t>(bits[bit / 32]) >> (bit % 32) & 1u) {
      return tree_start + bits_below<Config::kWords>(bits, bit);
    }
  }
  return slot;
}

__device__ __forceinline__ void store_keys(const KeyMaker& maker, const float* tables,
                                           const int* entries, uint32_t* pool) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int head = static_cast<int>(blockIdx.y) % kFeatureGroups * kCtaHeads +
                   KeyMaker::warpgroup() * kGroupHeads + KeyMaker::group_head();
  const int pair = static_cast<int>(threadIdx.x) / 32 % 4 % kHeadTiles * 4 + t;
  maker.finish(tables, [&](int n, uint32_t low, uint32_t high) {
    const uint32_t first = transpose_8x8(low), second = transpose_8x8(high);
    const int entry = entries[8 * n + g];
    if (entry < 0 || head >= Config::kKvHeads) return;
    const int64_t page = entry / Config::kPageSize;
    uint32_t* to =
        pool +
        ((page * Config::kKvHeads + head) * Config::kPageSize + entry % Config::kPageSize) *
            (Config::kWidth / 2) +
        pair;
    to[0] = first;
    to[Config::kWidth / 4] = second;
  });
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kLatentThreads, 1)
    rebuild_context(const uint4* c_pool, const uint4* w_k, const uint16_t* b_k, const uint4* w_v,
                    const uint16_t* b_v, const uint4* cos, const uint4* sin, const int* page_table,
                    const int* row_start, const int* row_slot, const int* tree_start,
                    const int* ancestor_bits, uint32_t* workspace_keys,
                    uint32_t* workspace_values) {
  DYNAMIC_SHARED(unsigned char, shared);
  static_assert(16 * (2 * (kStageUnits + kTableUnits) + kWaitingUnits) == Config::kSharedBytes,
                "the launch requests the layout below");
  __shared__ int bounds[2];
  __shared__ int entries[2][kTile];
  uint4* ring = reinterpret_cast<uint4*>(shared);  // [2][kStageUnits]
  uint4* tables = ring + 2 * kStageUnits;          // [2][kTableUnits]
  uint4* waiting = tables + 2 * kTableUnits;
  const bool values = blockIdx.y >= kFeatureGroups;
  pdl_launch_dependents();
  KeyMaker maker;
  maker.load(values ? w_v : w_k, values ? b_v : b_k, blockIdx.y % kFeatureGroups, ring, waiting);
  pdl_wait();
  const Inputs in{c_pool, cos, sin, row_slot, ancestor_bits};
  LatentWalk walk;
  for (int sequence = 0; sequence < Config::kBatch; ++sequence) {
    const int begin = row_start[sequence], stop = row_start[sequence + 1];
    if (begin == stop) continue;
    const int start = tree_start[sequence];
    const Span seen = seen_slots(in, begin, stop, start, bounds);
    const int* table = page_table + static_cast<int64_t>(sequence) * Config::kTable;
    const auto fetch = [&](int tile, int stage) {
      if (tile * kTile <= seen.last) {
        const auto entry_of = [&](int token) {
          const int slot = tile * kTile + token;
          return seen.holds(slot) ? table[slot / Config::kPageSize] * Config::kPageSize +
                                        slot % Config::kPageSize
                                  : -1;
        };
        const int lane = threadIdx.x % 32;
        const int2 own = make_int2(entry_of(lane), kTile > 32 ? entry_of(lane + 32) : -1);
        walk.fetch(c_pool, own, ring + stage * kStageUnits);
        if (threadIdx.x < kTile) entries[stage][threadIdx.x] = entry_of(threadIdx.x);
        if (!values) {
          fetch_tables<kLatentThreads>(
              cos, sin, Config::kPositions, tables + stage * kTableUnits,
              [&](int token) { return position_of(in, begin, stop, start, tile * kTile + token); });
        }
      }
      cp_async_commit();
    };
    int stage = 0, tile = seen.first / kTile + static_cast<int>(blockIdx.x);
    fetch(tile, 0);
    for (; tile * kTile <= seen.last; tile += static_cast<int>(gridDim.x)) {
      fetch(tile + static_cast<int>(gridDim.x), stage ^ 1);
      cp_async_wait<1>();
      fence_async_shared();
      __syncthreads();
      maker.start(ring + stage * kStageUnits);
      maker.wait();
      store_keys(maker,
                 values ? nullptr : reinterpret_cast<const float*>(tables + stage * kTableUnits),
                 entries[stage], values ? workspace_values : workspace_keys);
      __syncthreads();
      stage ^= 1;
    }
  }
}
