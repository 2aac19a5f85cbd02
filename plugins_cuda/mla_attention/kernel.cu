// MlaAttention with rebuilt keys, for decoding, verification and drafting: split over the context.
//
//   q              bf16 [T, KV_HEADS·GROUP, WIDTH], rotated
//   c_pool         bf16 [pages, 1, PAGE_SIZE, ENTRY]
//   w_k            bf16 [ENTRY, KV_HEADS, WIDTH], constant
//   b_k            bf16 [KV_HEADS, WIDTH], constant; null without HAS_BIAS
//   cos, sin       f32  [POSITIONS, WIDTH/2], constant
//   page_table     i32  [B, 1, TABLE]
//   row_start      i32  [B + 1]
//   row_slot       i32  [T]
//   tree_start     i32  [B]
//   ancestor_bits  i32  [T, WORDS]
//   selected, page_position   not taken: null
//   workspace_sums    f32  [T, KV_HEADS·GROUP, PLACES, 2], out
//   workspace_values  f32  [T, KV_HEADS·GROUP, PLACES, ENTRY], out, of places with a tile
//
// Grid (CONTEXT_CTAS, feature groups, B·ROW_CTAS). A CTA takes 128 features (two heads of 64),
// ROWS rows of a sequence, and slots x, x + CONTEXT_CTAS, … of the context (latent_walk.cuh). Four
// warpgroups hand tiles on: one copies latents and rotary tables into a ring; two keep the CTA's
// part of w_k in registers and rebuild a tile's keys, 64 features each (latent_keys.cuh), for which
// each has the tensor cores while the other rotates; the last has S = Q·Kᵀ, the weights, and their
// sums of latents (latent_mix.cuh). project_values (values.cu) joins the slots. The sums of a row
// depend neither on the rows that share the launch nor on the grid.
//
// A token takes 2·ENTRY bytes from memory, and as many from L2 for each feature group; 2·ENTRY·
// KV_HEADS·WIDTH operations for its keys, 2·KV_HEADS·GROUP·(WIDTH + ENTRY) for each row. For
// GPT-OSS with a latent of 512 that is 1 KB and 0.52 + 0.07 MFLOP: bound by the rebuilding.
#include "../_device/latent_copy.cuh"
#include "../_device/latent_keys.cuh"
#include "../_device/latent_mix.cuh"
#include "../_device/latent_scores.cuh"
#include "../_device/ptx_ring.cuh"

namespace {

constexpr int kThreads = kLatentThreads + kMixThreads + kCopyThreads;
constexpr int kFragmentUnits = kCtaFeatures * kTile / 8;
constexpr int kWeightUnits = kStates * kTile / 8;
static_assert(kLoadUnits <= 2 * kFragmentUnits, "weights come by way of the keys' place");

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
  Mbarrier* rebuilt;  // [2]: keys are there
  Mbarrier* scored;   // [2]: keys are used up
  int* guess;         // whether a tile is likely

  __device__ __forceinline__ explicit Memory(unsigned char* shared) {
    ring = reinterpret_cast<uint4*>(shared);
    tables = ring + STAGES * kStageUnits;
    keys = reinterpret_cast<uint2*>(tables + STAGES * kTableUnits);
    weights = reinterpret_cast<uint4*>(keys) + 2 * kFragmentUnits;
    waiting = weights + kWeightUnits;
    maxima = reinterpret_cast<float*>(waiting + kWaitingUnits);
    rescale = maxima + kMixWarps * kWarpStates;
    state = reinterpret_cast<float2*>(rescale + kStates);
    joined = state + kStates;
    full = reinterpret_cast<Mbarrier*>(joined + kStates);
    empty = full + STAGES;
    rebuilt = empty + STAGES;
    scored = rebuilt + 2;
    guess = reinterpret_cast<int*>(scored + 2);
  }

  __device__ __forceinline__ uint2* keys_of(int tile) const {
    return keys + tile % 2 * 2 * kFragmentUnits;
  }

  __device__ __forceinline__ void open_barriers() const {
    for (int i = 0; i < STAGES; ++i) {
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

// Where a row of weights stands in the workspaces: (row of the launch, query head), or −1.
__device__ __forceinline__ int64_t place_of(int row, int first, int count) {
  const int g = row % kHeads, head = row / kHeads % kCtaHeads, j = row / kHeads / kCtaHeads;
  const int kv_head = static_cast<int>(blockIdx.y) * kCtaHeads + head;
  if (g >= GROUP || kv_head >= KV_HEADS || j >= count) return -1;
  return (static_cast<int64_t>(first + j) * KV_HEADS + kv_head) * GROUP + g;
}

// What a CTA without a tile leaves.
__device__ __forceinline__ void leave_empty(int first, int count, float2* slot_sums) {
  for (int slot = blockIdx.x; slot < SPLIT; slot = next_slot(slot)) {
    if (slot >= SLOTS_IN_USE) continue;
    for (int row = mix_thread(); row < kStates; row += kMixThreads) {
      const int64_t at = place_of(row, first, count);
      if (at >= 0) slot_sums[at * PLACES + place_of_slot(slot)] = make_float2(no_maximum(), 0.0f);
    }
  }
}

struct Inputs {
  const uint32_t* q;
  const uint4* c_pool;
  const uint4* w_k;
  const uint16_t* b_k;
  const uint4* cos;
  const uint4* sin;
  const int* page_table;
  const int* row_start;
  const int* row_slot;
  const int* tree_start;
  const int* ancestor_bits;
};

// Calls use(walk, first) for each of the CTA's groups of rows, from row ``first`` on.
template <class Use>
__device__ __forceinline__ void for_rows(const Inputs& in, const Use& use) {
  const int sequence = blockIdx.z / ROW_CTAS;
  const int row_cta = static_cast<int>(blockIdx.z) % ROW_CTAS * ROWS;
  const int begin = in.row_start[sequence], stop = in.row_start[sequence + 1];
  LatentWalk walk;
  walk.table = in.page_table + static_cast<int64_t>(sequence) * TABLE;
  for (int first = begin + row_cta; first < stop; first += ROW_CTAS * ROWS) {
    walk.rows.open(first, min(ROWS, stop - first), in.row_slot, in.tree_start[sequence],
                   in.ancestor_bits);
    use(walk, first);
  }
}

// The registers of a warpgroup's threads from here on.
template <int count>
__device__ __forceinline__ void registers_set() {
  constexpr int kAtEntry = (64 << 10) / kThreads;
  if constexpr (count > kAtEntry) registers_raise<count>();
  if constexpr (count < kAtEntry) registers_lower<count>();
}

// The warpgroup that copies.
__device__ __forceinline__ void copy_tiles(const Inputs& in, const Memory& memory) {
  int filled = 0;
  for_rows(in, [&](const LatentWalk& walk, int) {
    for (TileCursor at = walk.begin(); !at.ended(); walk.advance(at), ++filled) {
      const int from = at.tile * kTile, stage = filled % STAGES, round = filled / STAGES;
      TileCopy copy;
      copy.look_up(in.c_pool, [&](int token) { return walk.entry_at(from + token, at); });
      if (round > 0) mbarrier_wait(memory.empty + stage, (round + 1) % 2);
      fetch_tables<kCopyThreads>(in.cos, in.sin, POSITIONS, memory.tables + stage * kTableUnits,
                                 [&](int token) { return from + token; });
      copy.start(memory.ring + stage * kStageUnits, 0, kEntryPanels);
      cp_async_arrive(memory.full + stage);
    }
  });
}

// The two that rebuild keys. ``maker`` has its weights if ``loaded``.
__device__ __forceinline__ void rebuild_keys(const Inputs& in, const Memory& memory,
                                             KeyMaker& maker, bool loaded) {
  int made = 0;
  for_rows(in, [&](const LatentWalk& walk, int) {
    TileCursor at = walk.begin();
    if (at.ended()) return;
    if (!loaded) {
      maker.load(in.w_k, in.b_k, blockIdx.y, reinterpret_cast<uint4*>(memory.keys), memory.waiting);
    }
    loaded = true;
#pragma unroll 1
    for (; !at.ended(); walk.advance(at), ++made) {
      const int stage = made % STAGES;
      mbarrier_wait(memory.full + stage, made / STAGES % 2);
      fence_async_shared();
      maker.start(memory.ring + stage * kStageUnits);
      maker.wait();
      if (made >= 2) mbarrier_wait(memory.scored + made % 2, (made / 2 + 1) % 2);
      uint2* keys =
          memory.keys_of(made) + (KeyMaker::warpgroup() * kGroupHeads + KeyMaker::group_head()) *
                                     (kTile / 8) * kHeadTiles * 32;
      const int key_tile = thread_index() / 32 % 4 % kHeadTiles;
      maker.finish(reinterpret_cast<const float*>(memory.tables + stage * kTableUnits),
                   [&](int n, uint32_t low, uint32_t high) {
                     keys[(n * kHeadTiles + key_tile) * 32 + thread_index() % 32] =
                         make_uint2(transpose_8x8(low), transpose_8x8(high));
                   });
      arrive(memory.rebuilt + made % 2);
      arrive(memory.empty + stage);
    }
  });
}

// The one that attends.
__device__ __forceinline__ void attend(const Inputs& in, const Memory& memory, float2* slot_sums,
                                       float* slot_values) {
  int attended = 0;
  for_rows(in, [&](const LatentWalk& walk, int first) {
    const int count = walk.rows.count;
    TileCursor at = walk.begin();
    if (at.ended()) {
      leave_empty(first, count, slot_sums);
      return;
    }
    Softmax softmax;
    softmax.open(in.q, first, count);
    Mixer<kMTiles> mixer;
    for (int slot = blockIdx.x; slot < SPLIT; slot = next_slot(slot)) {
      if (slot >= SLOTS_IN_USE) continue;
      const bool any = at.slot() == slot;
      mixer.clear();
      softmax.clear();
#pragma unroll 1
      for (; at.slot() == slot; walk.advance(at), ++attended) {
        const int stage = attended % STAGES;
        softmax.take_scores(memory, attended, walk.rows, at);
        mix_sync();
        softmax.take_weights(memory.weights, memory.rescale, memory.maxima);
        mix_sync();
        mbarrier_wait(memory.full + stage, attended / STAGES % 2);
        mixer.add(memory.weights, memory.rescale, memory.ring + stage * kStageUnits);
        arrive(memory.empty + stage);
      }
      softmax.publish(memory.state, memory.maxima);
      mixer.end_slot(slot, any, memory.state, memory.joined, slot_sums, slot_values,
                     [&](int row) { return place_of(row, first, count); });
    }
  });
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attend_latents(const uint32_t* q, const uint4* c_pool, const uint4* w_k, const uint16_t* b_k,
                   const uint4* cos, const uint4* sin, const int* page_table, const int* row_start,
                   const int* row_slot, const int* tree_start, const int* ancestor_bits,
                   const int* selected, const int* page_position, float2* workspace_sums,
                   float* workspace_values) {
  DYNAMIC_SHARED(unsigned char, shared);
  const Memory memory(shared);
  const Inputs in{q,          c_pool,    w_k,      b_k,        cos,          sin,
                  page_table, row_start, row_slot, tree_start, ancestor_bits};
  pdl_launch_dependents();
  // Whether this CTA may have a tile is a guess before the wait, good enough to load weights by.
  if (thread_index() == 0) {
    memory.open_barriers();
    const int sequence = blockIdx.z / ROW_CTAS;
    const int slot = load_l2_int(row_slot + min(sequence * SEQUENCE_ROWS, LAUNCH_ROWS - 1));
    *memory.guess = WINDOW > 0 || static_cast<int>(blockIdx.x) <= slot / kTile + 1;
  }
  __syncthreads();
  const int warpgroup = thread_index() / 128;
  if (warpgroup == 3) {
    registers_set<COPY_REGISTERS>();
    pdl_wait();
    copy_tiles(in, memory);
  } else if (warpgroup == 2) {
    registers_set<MIX_REGISTERS>();
    pdl_wait();
    attend(in, memory, workspace_sums, workspace_values);
  } else {
    registers_set<KEY_REGISTERS>();
    KeyMaker maker;
    const bool guess = *memory.guess != 0;
    if (guess) {
      maker.load(w_k, b_k, blockIdx.y, reinterpret_cast<uint4*>(memory.keys), memory.waiting);
    }
    pdl_wait();
    rebuild_keys(in, memory, maker, guess);
  }
}
