// MlaAttention with rebuilt keys: what a CTA does with the rows of a sequence.
//
// kernel.cu says how it is cut and what its tensors are; whole_rows.cu and selected.cu attend with
// lists of slots.
#pragma once

#include "../_device/latent_keys.cuh"
#include "../_device/latent_mix.cuh"

namespace {

constexpr int kHeads = 8;  // of a KV head, GROUP of them real
constexpr int kMTiles = ROWS * kCtaHeads * kHeads / 16;
constexpr int kStates = 16 * kMTiles;
constexpr int kBlocks = kTile / 32;  // of 8 tokens, of a warp
constexpr int kWarpStates = kGroupHeads * 2 * kHeads;
constexpr int kFragmentUnits = kCtaFeatures * kTile / 8;
constexpr float kScale = static_cast<float>(SCALE) * kLog2E;
static_assert(GROUP <= kHeads && SCALE > 0, "one mma holds two rows of a KV head's heads");

struct Memory {
  uint4* ring;     // [STAGES][kStageUnits]
  uint4* tables;   // kTableUnits
  uint2* keys;     // [kCtaHeads][kTile / 8][kHeadTiles][lanes]: B operands
  uint4* weights;  // [kStates][kTile], in the keys' place
  uint4* waiting;  // of KeyMaker
  float* maxima;   // [warps][kGroupHeads][2][kHeads]
  float* rescale;  // [kStates]
  float2* state;   // [kStates]
  float2* joined;  // [kStates]
  int* guess;      // whether a tile is likely, in a place of its own; later free

  __device__ __forceinline__ explicit Memory(unsigned char* shared) {
    ring = reinterpret_cast<uint4*>(shared);
    tables = ring + STAGES * kStageUnits;
    weights = tables + kTableUnits;
    keys = reinterpret_cast<uint2*>(weights);
    waiting = weights + kFragmentUnits;
    maxima = reinterpret_cast<float*>(waiting + kWaitingUnits);
    rescale = maxima + 8 * kWarpStates;
    state = reinterpret_cast<float2*>(rescale + kStates);
    joined = state + kStates;
    guess = reinterpret_cast<int*>(joined + kStates);
  }
};

// Weights of a tile of a warp's tokens: lane 4·g + t has head g of row j, tokens 8n + 2t, + 1.
struct Softmax {
  const uint32_t* queries;
  int first_row, rows_held;
  float score[kGroupHeads][kBlocks][4];
  RowState state[kGroupHeads][ROWS];

  __device__ __forceinline__ static int warp() {
    return thread_index() / 32;
  }
  // The row of weights of a head of this warpgroup and a row.
  __device__ __forceinline__ static int row_of(int head, int j) {
    const int g = thread_index() % 32 / 4;
    return (j * kCtaHeads + KeyMaker::warpgroup() * kGroupHeads + head) * kHeads + g;
  }

  // A head's queries as A operands. They are read anew for every tile: registers are scarce.
  __device__ __forceinline__ void load(uint32_t (&q)[kHeadTiles][4], int head) const {
    const int g = thread_index() % 32 / 4, t = thread_index() % 4;
    const int kv_head = blockIdx.y * kCtaHeads + KeyMaker::warpgroup() * kGroupHeads + head;
    const bool real = g < GROUP && kv_head < KV_HEADS;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int64_t row = first_row + min(j, rows_held - 1);
      const uint32_t* from = queries + ((row * KV_HEADS + kv_head) * GROUP + g) * (WIDTH / 2) + t;
#pragma unroll
      for (int tile = 0; tile < kHeadTiles; ++tile) {
        q[tile][j] = real && j < ROWS ? from[4 * tile] : 0u;
        q[tile][j + 2] = real && j < ROWS ? from[4 * tile + WIDTH / 4] : 0u;
      }
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kGroupHeads * ROWS; ++i) state[i / ROWS][i % ROWS].clear();
  }

  // S = Q·Kᵀ, what is not seen left out; and each row's greatest to ``maxima``.
  __device__ __forceinline__ void take_scores(const uint2* keys, float* maxima,
                                              const LatentRows& rows, const TileCursor& at) {
    const int lane = thread_index() % 32, t = lane % 4, block = warp() % 4 * kBlocks;
    bool listed[2 * kBlocks];
#pragma unroll
    for (int i = 0; i < 2 * kBlocks && LISTED; ++i) {
      listed[i] = rows.listed_slot(at.tile * kTile + (block + i / 2) * 8 + 2 * t + i % 2) >= 0;
    }
#pragma unroll
    for (int head = 0; head < kGroupHeads; ++head) {
      const uint2* of_head =
          keys + (KeyMaker::warpgroup() * kGroupHeads + head) * (kTile / 8) * kHeadTiles * 32;
      uint32_t q[kHeadTiles][4];
      load(q, head);
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        float (&own)[4] = score[head][n];
        own[0] = own[1] = own[2] = own[3] = 0.0f;
#pragma unroll
        for (int tile = 0; tile < kHeadTiles; ++tile) {
          const uint2 pair = of_head[((block + n) * kHeadTiles + tile) * 32 + lane];
          const uint32_t b[2] = {pair.x, pair.y};
          mma_bf16(own, q[tile], b);
        }
      }
#pragma unroll
      for (int j = 0; j < ROWS; ++j) {
        const Span span = rows.span(j, at.owner);
        float top = no_maximum();
#pragma unroll
        for (int i = 0; i < 2 * kBlocks; ++i) {
          float& mine = score[head][i / 2][2 * j + i % 2];
          const int place = at.tile * kTile + (block + i / 2) * 8 + 2 * t + i % 2;
          if (LISTED ? !listed[i] : !span.holds(place)) mine = no_maximum();
          top = fmaxf(top, mine);
        }
        top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
        top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
        if (t == 0) maxima[warp() * kWarpStates + (head * 2 + j) * kHeads + lane / 4] = top;
      }
    }
  }

  // Weights by the greatest of all four warps' scores, and what the sums so far are multiplied by.
  __device__ __forceinline__ void take_weights(uint4* weights, float* rescale,
                                               const float* maxima) {
    const int lane = thread_index() % 32, g = lane / 4, t = lane % 4, block = warp() % 4 * kBlocks;
#pragma unroll
    for (int head = 0; head < kGroupHeads; ++head) {
#pragma unroll
      for (int j = 0; j < ROWS; ++j) {
        RowState& own = state[head][j];
        float top = own.maximum;
#pragma unroll
        for (int other = 0; other < 4; ++other) {
          const int from = KeyMaker::warpgroup() * 4 + other;
          top = fmaxf(top, maxima[from * kWarpStates + (head * 2 + j) * kHeads + g]);
        }
        const float base = finite_maximum(top), shift = -__fmul_rn(base, kScale);
        const float factor = exp2_fast(__fmul_rn(own.maximum - base, kScale));
        own.maximum = top;
        float added = 0.0f;
        unsigned char* to = reinterpret_cast<unsigned char*>(weights) + 4 * t;
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
          const float low = exp2_fast(__fmaf_rn(score[head][n][2 * j], kScale, shift));
          const float high = exp2_fast(__fmaf_rn(score[head][n][2 * j + 1], kScale, shift));
          added += low + high;
          *reinterpret_cast<uint32_t*>(to + 16 * tile_unit<kTile>(row_of(head, j), block + n)) =
              pack_bf16x2(low, high);
        }
        own.sum = __fmaf_rn(own.sum, factor, added);
        if (t == 0 && warp() % 4 == 0) rescale[row_of(head, j)] = factor;
      }
    }
  }

  // The rows' maxima and sums over a slot, by way of ``maxima``.
  __device__ __forceinline__ void publish(float2* slot_state, float* maxima) const {
    const int lane = thread_index() % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < kGroupHeads * ROWS; ++i) {
      float sum = state[i / ROWS][i % ROWS].sum;
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      if (t == 0) maxima[warp() * kWarpStates + (i / ROWS * 2 + i % ROWS) * kHeads + g] = sum;
    }
    __syncthreads();
    if (warp() % 4 == 0 && t == 0) {
#pragma unroll
      for (int i = 0; i < kGroupHeads * ROWS; ++i) {
        const float* from = maxima + (i / ROWS * 2 + i % ROWS) * kHeads + g;
        float sum = 0.0f;
#pragma unroll
        for (int other = 0; other < 4; ++other) sum += from[(warp() + other) * kWarpStates];
        slot_state[row_of(i / ROWS, i % ROWS)] =
            make_float2(__fmul_rn(state[i / ROWS][i % ROWS].maximum, kScale), sum);
      }
    }
    __syncthreads();
  }
};

struct Inputs {
  const uint32_t* q;
  const uint4* c_pool;
  const uint4* cos;
  const uint4* sin;
  const int* row_slot;
  const int* ancestor_bits;
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
    for (int row = thread_index(); row < kStates; row += kLatentThreads) {
      const int64_t at = place_of(row, first, count);
      if (at >= 0) slot_sums[at * PLACES + place_of_slot(slot)] = make_float2(no_maximum(), 0.0f);
    }
  }
}

__device__ __forceinline__ void attend_rows(const Inputs& in, const LatentWalk& walk,
                                            KeyMaker& maker, const Memory& memory, int first,
                                            float2* slot_sums, float* slot_values) {
  const int count = walk.rows.count;
  TileCursor at = walk.begin(), ahead = at;
  const auto fetch_next = [&](int to) {
    if (!ahead.ended()) {
      walk.fetch(in.c_pool, walk.look_up(ahead), memory.ring + to * kStageUnits);
      walk.advance(ahead);
    }
    cp_async_commit();
  };
  const auto fetch_tables_of = [&](const TileCursor& tile) {
    if (!tile.ended()) {
      fetch_tables(in.cos, in.sin, POSITIONS, memory.tables,
                   [&](int token) { return walk.rows.position_of(tile.tile * kTile + token); });
    }
    cp_async_commit();
  };
  fetch_tables_of(at);
  fetch_next(0);
  cp_async_wait<0>();
#pragma unroll 1
  for (int i = 1; i < STAGES; ++i) fetch_next(i);
  Softmax softmax;
  softmax.queries = in.q;
  softmax.first_row = first;
  softmax.rows_held = count;
  Mixer<kMTiles> mixer;
  fence_async_shared();
  __syncthreads();
  // Behind the last tile it is whatever the ring holds: nobody asks for it, and an unconditional
  // start leaves the sums in their registers.
  maker.start(memory.ring);
  int stage = 0;
  bool is_first = true;
  for (int slot = blockIdx.x; slot < SPLIT; slot = next_slot(slot)) {
    if (slot >= SLOTS_IN_USE) continue;
    const bool any = at.slot() == slot;
    mixer.clear();
    softmax.clear();
    while (at.slot() == slot) {
      const int spent = stage;
      stage = stage + 1 == STAGES ? 0 : stage + 1;
      maker.wait();
      uint2* keys = memory.keys + (KeyMaker::warpgroup() * kGroupHeads + KeyMaker::group_head()) *
                                      (kTile / 8) * kHeadTiles * 32;
      const int key_tile = thread_index() / 32 % 4 % kHeadTiles;
      maker.finish(reinterpret_cast<const float*>(memory.tables),
                   [&](int n, uint32_t low, uint32_t high) {
                     keys[(n * kHeadTiles + key_tile) * 32 + thread_index() % 32] =
                         make_uint2(transpose_8x8(low), transpose_8x8(high));
                   });
      if (STAGES == 2 || is_first) {
        cp_async_wait<0>();
        fence_async_shared();
        is_first = false;
      }
      __syncthreads();
      maker.start(memory.ring + stage * kStageUnits);
      softmax.take_scores(memory.keys, memory.maxima, walk.rows, at);
      walk.advance(at);
      fetch_tables_of(at);
      __syncthreads();
      softmax.take_weights(memory.weights, memory.rescale, memory.maxima);
      __syncthreads();
      mixer.add(memory.weights, memory.rescale, memory.ring + spent * kStageUnits);
      cp_async_wait<0>();
      fence_async_shared();
      __syncthreads();
      fetch_next(spent);
    }
    softmax.publish(memory.state, memory.maxima);
    mixer.end_slot(slot, any, memory.state, memory.joined, slot_sums, slot_values,
                   [&](int row) { return place_of(row, first, count); });
  }
  maker.wait();
}

// Keys and the queries' context of one sequence, as the kernels are given them.
struct Arguments {
  Inputs in;
  const uint4* w_k;
  const uint16_t* b_k;
  const int* page_table;
  const int* row_start;
  const int* tree_start;
  float2* slot_sums;
  float* slot_values;
};

// The rows of a CTA, a few at a time. ``early``: whether w_k is likely wanted, asked before the
// wait. ``opens(walk, first, count)`` gives the walk its rows, false where they are not attended
// here.
template <class Opens>
__device__ __forceinline__ void attend_sequence(const Arguments& given, const Memory& memory,
                                                bool early, const Opens& opens) {
  const int sequence = blockIdx.z / ROW_CTAS;
  const int row_cta = static_cast<int>(blockIdx.z) % ROW_CTAS * ROWS;
  if (thread_index() == 0) *memory.guess = early;
  __syncthreads();
  bool loaded = *memory.guess != 0;
  KeyMaker maker;
  if (loaded) maker.load(given.w_k, given.b_k, blockIdx.y, memory.ring, memory.waiting);
  pdl_wait();
  const int begin = given.row_start[sequence], stop = given.row_start[sequence + 1];
  LatentWalk walk;
  walk.table = given.page_table + static_cast<int64_t>(sequence) * TABLE;
  for (int first = begin + row_cta; first < stop; first += ROW_CTAS * ROWS) {
    if (!opens(walk, first, min(ROWS, stop - first))) continue;
    if (walk.begin().ended()) {
      leave_empty(first, walk.rows.count, given.slot_sums);
      continue;
    }
    if (!loaded) maker.load(given.w_k, given.b_k, blockIdx.y, memory.ring, memory.waiting);
    loaded = true;
    attend_rows(given.in, walk, maker, memory, first, given.slot_sums, given.slot_values);
    __syncthreads();
  }
}

#define ARGUMENTS                                                                                \
  Arguments {                                                                                    \
    {q, c_pool, cos, sin, row_slot, ancestor_bits}, w_k, b_k, page_table, row_start, tree_start, \
        workspace_sums, workspace_values                                                         \
  }

// Whether a CTA may have a tile, before the wait: a guess, good enough to load weights by.
__device__ __forceinline__ bool likely(const int* row_slot) {
  const int sequence = blockIdx.z / ROW_CTAS;
  const int slot = load_l2_int(row_slot + min(sequence * SEQUENCE_ROWS, LAUNCH_ROWS - 1));
  return WINDOW > 0 || static_cast<int>(blockIdx.x) <= slot / kTile + 1;
}

}  // namespace
