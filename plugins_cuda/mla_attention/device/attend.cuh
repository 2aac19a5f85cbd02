// MlaAttention with rebuilt keys: the work of a CTA for the rows of a sequence.
//
// The grid and the arguments are described in kernel.cu. whole_rows.cu and selected.cu also use
// this header, for launches with lists of slots.
#pragma once

#include "../../_device/ptx_ring.cuh"
#include "config.cuh"
#include "latent_copy.cuh"
#include "latent_keys.cuh"
#include "latent_mix.cuh"
#include "latent_scores.cuh"
#include "split_states.cuh"
#include "warpgroup_registers.cuh"

namespace {

constexpr int kThreads = kLatentThreads + kMixThreads + kCopyThreads;
constexpr int kFragmentUnits = kCtaFeatures * kTile / 8;
constexpr int kWeightUnits = kStates * kTile / 8;
static_assert(Config::kCopyRegisters * kCopyThreads + Config::kKeyRegisters * kLatentThreads +
                      Config::kMixRegisters * kMixThreads <=
                  registers_at_entry(kThreads) * kThreads,
              "no more registers than there are");
static_assert(kLoadUnits <= 2 * kFragmentUnits, "weights pass through the buffer of the keys");

constexpr int kSharedBytes = 16 * (Config::kStages * (kStageUnits + kTableUnits) +
                                   2 * kFragmentUnits + kWeightUnits + kWaitingUnits) +
                             4 * kMixWarps * kWarpStates + 20 * kStates +
                             8 * (2 * Config::kStages + 4) + 16;
static_assert(kSharedBytes == Config::kSharedBytes, "the launch requests the layout below");

struct Memory {
  uint4* ring;        // [STAGES][kStageUnits]
  uint4* tables;      // [STAGES][kTableUnits]
  uint2* keys;        // [2][kCtaHeads][kTile / 8][kHeadTiles][lanes]: B operands
  uint4* weights;     // [kStates][kTile]
  uint4* waiting;     // of KeyMaker
  float* maxima;      // [kMixWarps][kCtaHeads][2][kHeads]
  float* rescale;     // [kStates]
  float2* state;      // [kStates]
  float2* joined;     // [kStates]
  Mbarrier* full;     // [STAGES]
  Mbarrier* empty;    // [STAGES]
  Mbarrier* rebuilt;  // [2]: keys are available
  Mbarrier* scored;   // [2]: keys have been used
  int* guess;         // whether the CTA probably has a tile

  __device__ __forceinline__ explicit Memory(unsigned char* shared) {
    ring = reinterpret_cast<uint4*>(shared);
    tables = ring + Config::kStages * kStageUnits;
    keys = reinterpret_cast<uint2*>(tables + Config::kStages * kTableUnits);
    weights = reinterpret_cast<uint4*>(keys) + 2 * kFragmentUnits;
    waiting = weights + kWeightUnits;
    maxima = reinterpret_cast<float*>(waiting + kWaitingUnits);
    rescale = maxima + kMixWarps * kWarpStates;
    state = reinterpret_cast<float2*>(rescale + kStates);
    joined = state + kStates;
    full = reinterpret_cast<Mbarrier*>(joined + kStates);
    empty = full + Config::kStages;
    rebuilt = empty + Config::kStages;
    scored = rebuilt + 2;
    guess = reinterpret_cast<int*>(scored + 2);
  }

  __device__ __forceinline__ uint2* keys_of(int tile) const {
    return keys + tile % 2 * 2 * kFragmentUnits;
  }

  __device__ __forceinline__ void open_barriers() const {
    for (int i = 0; i < Config::kStages; ++i) {
      mbarrier_init(full + i, kCopyThreads);
      mbarrier_init(empty + i, kLatentThreads / 32 + kMixWarps);
    }
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(rebuilt + i, kLatentThreads / 32);
      mbarrier_init(scored + i, kMixWarps);
    }
    mbarrier_init_fence();
  }
};

struct Inputs {
  const uint32_t* q;
  const uint4* c_pool;
  const uint4* w_k;
  const uint16_t* b_k;
  const uint4* cos;
  const uint4* sin;
  RowInputs rows;
  const int* page_position;
  float2* split_sums;
  float* split_values;
};

// Call use(walk, first) for each of the CTA's groups of rows, from row ``first`` on.
// ``opens(walk.rows, first, count, sequence)`` opens the rows in the walk, or returns false to skip
// them. Complete warps of any warpgroup call it.
template <class Opens, class Use>
__device__ __forceinline__ void for_rows(const Inputs& in, const Opens& opens, const Use& use) {
  const int sequence = blockIdx.z / Config::kRowCtas;
  const int row_cta = static_cast<int>(blockIdx.z) % Config::kRowCtas * Config::kRows;
  const int begin = in.rows.row_start[sequence], stop = in.rows.row_start[sequence + 1];
  LatentWalk walk;
  walk.table = in.rows.page_table + static_cast<int64_t>(sequence) * Config::kTable;
  walk.begins = Config::kViewed ? in.page_position + static_cast<int64_t>(sequence) * Config::kTable
                                : nullptr;
  for (int first = begin + row_cta; first < stop; first += Config::kRowCtas * Config::kRows) {
    if (opens(walk.rows, first, min(Config::kRows, stop - first), sequence)) use(walk, first);
  }
}

// The copying warpgroup.
template <class Opens>
__device__ __forceinline__ void copy_tiles(const Inputs& in, const Memory& memory,
                                           const Opens& opens) {
  int filled = 0;
  for_rows(in, opens, [&](const LatentWalk& walk, int) {
    for (TileCursor at = walk.begin(); !at.ended(); walk.advance(at), ++filled) {
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
    }
  });
}

// The two rebuilding warpgroups. ``maker`` has its weights if ``loaded``.
template <class Opens>
__device__ __forceinline__ void rebuild_keys(const Inputs& in, const Memory& memory,
                                             const Opens& opens, KeyMaker& maker, bool loaded) {
  int num_rebuilt = 0;
  for_rows(in, opens, [&](const LatentWalk& walk, int) {
    TileCursor at = walk.begin();
    if (at.ended()) return;
    if (!loaded) {
      maker.load(in.w_k, in.b_k, blockIdx.y, reinterpret_cast<uint4*>(memory.keys), memory.waiting);
    }
    loaded = true;
#pragma unroll 1
    for (; !at.ended(); walk.advance(at), ++num_rebuilt) {
      const int stage = num_rebuilt % Config::kStages;
      mbarrier_wait(memory.full + stage, num_rebuilt / Config::kStages % 2);
      fence_async_shared();
      maker.start(memory.ring + stage * kStageUnits);
      maker.wait();
      if (num_rebuilt >= 2)
        mbarrier_wait(memory.scored + num_rebuilt % 2, (num_rebuilt / 2 + 1) % 2);
      uint2* keys = memory.keys_of(num_rebuilt) +
                    (KeyMaker::warpgroup() * kGroupHeads + KeyMaker::group_head()) * (kTile / 8) *
                        kHeadTiles * 32;
      const int key_tile = thread_index() / 32 % 4 % kHeadTiles;
      maker.finish(reinterpret_cast<const float*>(memory.tables + stage * kTableUnits),
                   [&](int n, uint32_t low, uint32_t high) {
                     keys[(n * kHeadTiles + key_tile) * 32 + thread_index() % 32] =
                         make_uint2(transpose_8x8(low), transpose_8x8(high));
                   });
      arrive(memory.rebuilt + num_rebuilt % 2);
      arrive(memory.empty + stage);
    }
  });
}

// The attending warpgroup.
template <class Opens>
__device__ __forceinline__ void attend(const Inputs& in, const Memory& memory, const Opens& opens) {
  int attended = 0;
  for_rows(in, opens, [&](const LatentWalk& walk, int first) {
    const int count = walk.rows.count;
    TileCursor at = walk.begin();
    if (at.ended()) {
      leave_empty(first, count, in.split_sums);
      return;
    }
    Softmax softmax;
    softmax.open(in.q, first, count);
    Mixer<kMTiles> mixer;
    for (int split = blockIdx.x; split < Config::kSplit; split = next_split(split)) {
      if (split >= Config::kSplitsInUse) continue;
      const bool any = at.split() == split;
      mixer.clear();
      softmax.clear();
#pragma unroll 1
      for (; at.split() == split; walk.advance(at), ++attended) {
        const int stage = attended % Config::kStages;
        const int half = attended % 2;
        const auto keys = [&] {
          mbarrier_wait(memory.rebuilt + half, attended / 2 % 2);
          return memory.keys_of(attended);
        };
        const auto used_up = [&] { arrive(memory.scored + half); };
        softmax.take_scores(keys, used_up, memory.maxima, walk.rows, at);
        mix_sync();
        softmax.take_weights(memory.weights, memory.rescale, memory.maxima);
        mix_sync();
        mbarrier_wait(memory.full + stage, attended / Config::kStages % 2);
        mixer.add(memory.weights, memory.rescale, memory.ring + stage * kStageUnits);
        arrive(memory.empty + stage);
      }
      softmax.publish(memory.state, memory.maxima);
      mixer.end_split(split, any, memory.state, memory.joined, in.split_sums, in.split_values,
                      [&](int row) { return place_of(row, first, count); });
    }
  });
}

// The work of a CTA, by warpgroups. ``early()`` returns, in thread 0 before griddepcontrol.wait,
// whether w_k is probably required. ``opens``: see for_rows().
template <class Early, class Opens>
__device__ __forceinline__ void attend_sequence(const Inputs& in, const Memory& memory,
                                                const Early& early, const Opens& opens) {
  pdl_launch_dependents();
  if (thread_index() == 0) {
    memory.open_barriers();
    *memory.guess = early();
  }
  __syncthreads();
  const int warpgroup = thread_index() / 128;
  if (warpgroup == 3) {
    registers_set<kThreads, Config::kCopyRegisters>();
    pdl_wait();
    copy_tiles(in, memory, opens);
  } else if (warpgroup == 2) {
    registers_set<kThreads, Config::kMixRegisters>();
    pdl_wait();
    attend(in, memory, opens);
  } else {
    registers_set<kThreads, Config::kKeyRegisters>();
    KeyMaker maker;
    const bool guess = *memory.guess != 0;
    if (guess) {
      maker.load(in.w_k, in.b_k, blockIdx.y, reinterpret_cast<uint4*>(memory.keys), memory.waiting);
    }
    pdl_wait();
    rebuild_keys(in, memory, opens, maker, guess);
  }
}

#define INPUTS                                                                                 \
  Inputs {                                                                                     \
    q, c_pool, w_k, b_k, cos, sin, page_table, row_start, row_slot, tree_start, ancestor_bits, \
        page_position, workspace_sums, workspace_values                                        \
  }

}  // namespace
