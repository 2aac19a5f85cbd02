// MlaAttention with rebuilt keys for sequences of several rows: attention to stored keys.
//
//   q, c_pool, page_table, row_start, row_slot, tree_start, ancestor_bits   see kernel.cu
//   selected         see stored_keys.cu; CTAs without a whole row compute nothing
//   workspace_keys   bf16, stored tiles (stored_tiles.cuh)
//   workspace_sums, workspace_values   see kernel.cu, out
//
// Grid (CONTEXT_CTAS, feature groups, row tiles). A CTA has two heads, a tile of rows of one
// sequence (ROWS for each of CONSUMER_WARPGROUPS attending warpgroups), and splits as in kernel.cu.
// One more warpgroup copies tiles of latents and of keys, which all rows share. Each attending
// warpgroup computes scores, weights and sums of latents of its rows, in the order of
// attend_latents, so that the bits are equal.
//
// A token takes 2·ENTRY bytes, and 256 bytes of keys from L2, for each feature group and
// CONSUMER_WARPGROUPS·ROWS rows. It takes 2·KV_HEADS·GROUP·(WIDTH + ENTRY) operations per row.
#include "../_device/ptx_ring.cuh"
#include "../_device/row_tile.cuh"
#include "device/config.cuh"
#include "device/latent_copy.cuh"
#include "device/latent_mix.cuh"
#include "device/latent_scores.cuh"
#include "device/split_states.cuh"
#include "device/stored_tiles.cuh"
#include "device/warpgroup_registers.cuh"

namespace {

constexpr int kThreads = Config::kConsumerWarpgroups * kMixThreads + kCopyThreads;
constexpr int kRows = Config::kConsumerWarpgroups * Config::kRows;  // of a CTA
// With one row per warpgroup, its tiles would count as shared tiles (latent_rows.cuh).
static_assert(Config::kRows == 2, "rows have separate tiles, as in the walk");
constexpr int kWeightUnits = kStates * kTile / 8;
using Walk = WalkOf<StoredRows<kRows>>;

// The buffers of one attending warpgroup.
struct WarpgroupMemory {
  uint4* weights;  // [kStates][kTile]
  float* maxima;   // [kMixWarps][kWarpStates]
  float* rescale;  // [kStates]
  float2* state;   // [kStates]
  float2* joined;  // [kStates]
};

constexpr int kSharedBytes =
    16 * Config::kStages * (kStageUnits + kKeyUnits + 1) +
    Config::kConsumerWarpgroups *
        (16 * (kWeightUnits + kStates) + 4 * (kMixWarps * kWarpStates + kStates));
static_assert(kSharedBytes == Config::kSharedBytes, "the launch requests the layout below");

struct Memory {
  uint4* ring;      // [STAGES][kStageUnits]
  uint4* keys;      // [STAGES][kKeyUnits]
  uint4* weights;   // of all attending warpgroups, like the following
  float2* states;   // [CONSUMER_WARPGROUPS][2][kStates]
  float* floats;    // [CONSUMER_WARPGROUPS][kMixWarps · kWarpStates + kStates]
  Mbarrier* full;   // [STAGES]
  Mbarrier* empty;  // [STAGES]

  __device__ __forceinline__ explicit Memory(unsigned char* shared) {
    ring = reinterpret_cast<uint4*>(shared);
    keys = ring + Config::kStages * kStageUnits;
    weights = keys + Config::kStages * kKeyUnits;
    states = reinterpret_cast<float2*>(weights + Config::kConsumerWarpgroups * kWeightUnits);
    floats = reinterpret_cast<float*>(states + Config::kConsumerWarpgroups * 2 * kStates);
    full = reinterpret_cast<Mbarrier*>(floats + Config::kConsumerWarpgroups *
                                                    (kMixWarps * kWarpStates + kStates));
    empty = full + Config::kStages;
  }

  __device__ __forceinline__ WarpgroupMemory of(int warpgroup) const {
    float* const own = floats + warpgroup * (kMixWarps * kWarpStates + kStates);
    float2* const two = states + warpgroup * 2 * kStates;
    return {weights + warpgroup * kWeightUnits, own, own + kMixWarps * kWarpStates, two,
            two + kStates};
  }

  __device__ __forceinline__ void open_barriers() const {
    for (int i = 0; i < Config::kStages; ++i) {
      mbarrier_init(full + i, kCopyThreads);
      mbarrier_init(empty + i, Config::kConsumerWarpgroups * kMixWarps);
    }
    mbarrier_init_fence();
  }
};

struct Inputs {
  const uint32_t* q;
  const uint4* c_pool;
  RowInputs rows;
  const int* selected;
  const uint4* stored;
  float2* split_sums;
  float* split_values;
  int held;

  __device__ __forceinline__ void open(Walk& walk, int first, int count, int sequence) const {
    walk.table = rows.page_table + static_cast<int64_t>(sequence) * Config::kTable;
    walk.begins = nullptr;
    StoredRows<kRows>& seen = walk.rows;
    seen.tree_start = rows.tree_start[sequence];
    seen.bits = rows.bits(first);
    seen.shared_end = -1;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      seen.last[r] = -1;
      if (r >= count) continue;
      const RowView view = view_of<Config::kWords, Config::kWindow>(
          rows.row_slot[first + r], seen.tree_start, seen.bits + r * Config::kWords);
      seen.last[r] = view.last;
      seen.shared_end = max(seen.shared_end, shared_last_of(view));
    }
  }
};

// Call use(walk, first, count, sequence) for the CTA's rows if one of them is whole. Complete warps
// of any warpgroup call it.
template <class Use>
__device__ __forceinline__ void with_rows(const Inputs& in, const Use& use) {
  const RowTile own =
      row_tile<Config::kBatch, kRows>(in.rows.row_start, static_cast<int>(blockIdx.z));
  bool has_whole_row = false;
  for (int row = own.first; row < own.first + own.count; ++row) {
    has_whole_row = has_whole_row || sees_everything(in.selected, in.held, row);
  }
  if (!has_whole_row) return;
  Walk walk;
  in.open(walk, own.first, own.count, own.sequence);
  use(walk, own.first, own.count, own.sequence);
}

// The copying warpgroup.
__device__ __forceinline__ void copy_tiles(const Inputs& in, const Memory& memory) {
  int filled = 0;
  with_rows(in, [&](const Walk& walk, int first, int, int sequence) {
    for (TileCursor at = walk.begin(); !at.ended(); walk.advance(at), ++filled) {
      const int from = at.tile * kTile, stage = filled % Config::kStages,
                round = filled / Config::kStages;
      TileCopy copy;
      copy.look_up(in.c_pool, [&](int token) { return walk.entry_at(from + token, at); });
      const uint4* const keys = in.stored + stored_tile(sequence, first + at.owner - 1, at,
                                                        walk.rows.tree_start, blockIdx.y);
      if (round > 0) mbarrier_wait(memory.empty + stage, (round + 1) % 2);
#pragma unroll
      for (int i = 0; i < kKeyUnits; i += kCopyThreads) {
        const int unit = i + copy_thread();
        if (kKeyUnits % kCopyThreads != 0 && unit >= kKeyUnits) continue;
        cp_async_16(memory.keys + stage * kKeyUnits + unit, keys + unit);
      }
      start_copies(copy, memory.ring + stage * kStageUnits, 0, kEntryPanels);
      cp_async_arrive(memory.full + stage);
    }
  });
}

// An attending warpgroup.
__device__ __forceinline__ void attend(const Inputs& in, const Memory& memory, int warpgroup) {
  const WarpgroupMemory own_memory = memory.of(warpgroup);
  int filled = 0;
  with_rows(in, [&](const Walk& walk, int cta_first, int cta_count, int sequence) {
    const int first = cta_first + warpgroup * Config::kRows,
              count = min(Config::kRows, cta_count - warpgroup * Config::kRows);
    LatentRows rows;
    rows.shared_end = -1;
    if (count > 0) {
      rows.open(first, count, in.rows, walk.rows.tree_start);
    }
    TileCursor at = walk.begin();
    if (at.ended()) {
      leave_empty(first, count, in.split_sums);
      return;
    }
    Softmax softmax;
    if (count > 0) softmax.open(in.q, first, count);
    Mixer<kMTiles> mixed;
    for (int split = blockIdx.x; split < Config::kSplit; split = next_split(split)) {
      if (split >= Config::kSplitsInUse) continue;
      bool any = false;
      mixed.clear();
      softmax.clear();
#pragma unroll 1
      for (; at.split() == split; walk.advance(at), ++filled) {
        const int stage = filled % Config::kStages;
        const TileCursor own{at.owner == 0 ? 0 : at.owner - warpgroup * Config::kRows, at.tile};
        const bool sees = at.owner == 0 ? at.tile * kTile <= rows.shared_end
                                        : own.owner > 0 && own.owner <= count;
        mbarrier_wait(memory.full + stage, filled / Config::kStages % 2);
        if (sees) {
          any = true;
          const auto keys = [&] {
            return reinterpret_cast<const uint2*>(memory.keys + stage * kKeyUnits);
          };
          softmax.take_scores(keys, [] {}, own_memory.maxima, rows, own);
          mix_sync();
          softmax.take_weights(own_memory.weights, own_memory.rescale, own_memory.maxima);
          mix_sync();
          mixed.add(own_memory.weights, own_memory.rescale, memory.ring + stage * kStageUnits);
        }
        arrive(memory.empty + stage);
      }
      if (count <= 0) continue;
      softmax.publish(own_memory.state, own_memory.maxima);
      mixed.end_split(split, any, own_memory.state, own_memory.joined, in.split_sums,
                      in.split_values, [&](int row) { return place_of(row, first, count); });
    }
  });
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attend_stored(const uint32_t* q, const uint4* c_pool, const int* page_table,
                  const int* row_start, const int* row_slot, const int* tree_start,
                  const int* ancestor_bits, const int* selected, const uint4* workspace_keys,
                  float2* workspace_sums, float* workspace_values, int held) {
  DYNAMIC_SHARED(unsigned char, shared);
  const Memory memory(shared);
  const Inputs in{q,
                  c_pool,
                  page_table,
                  row_start,
                  row_slot,
                  tree_start,
                  ancestor_bits,
                  selected,
                  workspace_keys,
                  workspace_sums,
                  workspace_values,
                  held};
  pdl_launch_dependents();
  if (thread_index() == 0) memory.open_barriers();
  __syncthreads();
  const int warpgroup = thread_index() / 128;
  if (warpgroup == Config::kConsumerWarpgroups) {
    registers_set<kThreads, Config::kCopyRegisters>();
    pdl_wait();
    copy_tiles(in, memory);
  } else {
    registers_set<kThreads, Config::kMixRegisters>();
    pdl_wait();
    attend(in, memory, warpgroup);
  }
}
