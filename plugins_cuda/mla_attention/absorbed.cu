// MlaAttention with absorbed queries: one cache entry of a token is every head's key.
//
//   q              bf16 [T, Q_HEADS, ENTRY]
//   c_pool         bf16 [pages, 1, PAGE_SIZE, ENTRY]; the first VALUE columns are the value
//   page_table, row_start, row_slot, tree_start, ancestor_bits, selected, page_position,
//   workspace_sums, workspace_values   as in kernel.cu
//
// Grid (CONTEXT_CTAS, groups of 64 heads, B·ROW_CTAS). A CTA takes one row and 64 heads, which are
// the rows of its tiles: S = Q·Cᵀ by wgmma with both in shared memory, 32 tokens of a tile to each
// warpgroup; then the weights, and their sums of latents (latent_mix.cuh), of which every warp has
// some columns. project_values (values.cu) joins the slots.
//
// 2·ENTRY bytes and 128·(ENTRY + VALUE) operations a token, row and group of heads: 1152 bytes and
// 139 kFLOP for 512 + 64. A tile of 64 tokens is 73.7 KB, 2.2 µs of an SM's share of 4.53 TB/s;
// the tensor cores need about 1.7 µs for it (S 1150 cycles, the sums 1650 by mma.sync).
#include "../_device/latent_mix.cuh"
#include "../_device/ptx_wgmma_shared.cuh"

namespace {

constexpr int kHeads = 64;
constexpr int kMTiles = kHeads / 16;
constexpr int kQueryUnits = kEntryPanels * kHeads * 8;
constexpr int kGroupTokens = kTile / 2;
constexpr float kScale = static_cast<float>(SCALE) * kLog2E;
static_assert(TILE == 64 && ROWS == 1 && SCALE > 0, "32 tokens to each warpgroup");

struct Memory {
  uint4* queries;  // [kEntryPanels][kHeads][8]
  uint4* ring;     // [STAGES][kStageUnits]
  uint4* weights;  // [kHeads][kTile]
  float* maxima;   // [2][kHeads]
  float* rescale;  // [kHeads]
  float2* state;   // [kHeads]
  float2* joined;  // [kHeads]

  __device__ __forceinline__ explicit Memory(unsigned char* shared) {
    queries = reinterpret_cast<uint4*>(shared);
    ring = queries + kQueryUnits;
    weights = ring + STAGES * kStageUnits;
    maxima = reinterpret_cast<float*>(weights + kHeads * kTile / 8);
    rescale = maxima + 2 * kHeads;
    state = reinterpret_cast<float2*>(rescale + kHeads);
    joined = state + kHeads;
  }
};

// Warp w of warpgroup u: heads 16w + 8j + g, tokens 32u + 8n + 2t, + 1.
struct Softmax {
  float score[kGroupTokens / 2];
  RowState state[2];

  __device__ __forceinline__ static int group() {
    return static_cast<int>(threadIdx.x) / 128;
  }
  __device__ __forceinline__ static int head_of(int j) {
    return static_cast<int>(threadIdx.x) / 32 % 4 * 16 + 8 * j + threadIdx.x % 32 / 4;
  }

  __device__ __forceinline__ void clear() {
    state[0].clear();
    state[1].clear();
  }

  __device__ __forceinline__ void take_scores(const Memory& memory, const uint4* tile, Span span,
                                              int from) {
#pragma unroll
    for (int i = 0; i < kGroupTokens / 2; ++i) score[i] = 0.0f;
    wgmma_pin(score);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < ENTRY / 16; ++step) {
      const uint64_t a = wgmma_matrix(memory.queries + step / 4 * kHeads * 8);
      const uint64_t b = wgmma_matrix(tile + step / 4 * kPanelUnits + group() * kGroupTokens * 8);
      wgmma_bf16_shared(score, a + 2 * (step % 4), b + 2 * (step % 4));
    }
    wgmma_commit();
    wgmma_wait_shared();
    wgmma_pin(score);
    const int lane = threadIdx.x % 32, t = lane % 4;
    const int first = from + group() * kGroupTokens + 2 * t;
    float top[2] = {no_maximum(), no_maximum()};
#pragma unroll
    for (int i = 0; i < kGroupTokens / 2; ++i) {
      if (!span.holds(first + i / 4 * 8 + i % 2)) score[i] = no_maximum();
      top[i % 4 / 2] = fmaxf(top[i % 4 / 2], score[i]);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      top[j] = fmaxf(top[j], __shfl_xor_sync(kAllLanes, top[j], 1));
      top[j] = fmaxf(top[j], __shfl_xor_sync(kAllLanes, top[j], 2));
      if (t == 0) memory.maxima[group() * kHeads + head_of(j)] = top[j];
    }
  }

  __device__ __forceinline__ void take_weights(const Memory& memory) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int head = head_of(j);
      RowState& own = state[j];
      const float top =
          fmaxf(own.maximum, fmaxf(memory.maxima[head], memory.maxima[kHeads + head]));
      const float base = finite_maximum(top), shift = -__fmul_rn(base, kScale);
      const float factor = exp2_fast(__fmul_rn(own.maximum - base, kScale));
      own.maximum = top;
      float added = 0.0f;
      unsigned char* to = reinterpret_cast<unsigned char*>(memory.weights) + 4 * t;
#pragma unroll
      for (int n = 0; n < kGroupTokens / 8; ++n) {
        const float low = exp2_fast(__fmaf_rn(score[4 * n + 2 * j], kScale, shift));
        const float high = exp2_fast(__fmaf_rn(score[4 * n + 2 * j + 1], kScale, shift));
        added += low + high;
        const int unit = tile_unit<kTile>(head, group() * (kGroupTokens / 8) + n);
        *reinterpret_cast<uint32_t*>(to + 16 * unit) = pack_bf16x2(low, high);
      }
      own.sum = __fmaf_rn(own.sum, factor, added);
      if (t == 0 && group() == 0) memory.rescale[head] = factor;
    }
  }

  // The heads' maxima and sums over a slot, with all threads.
  __device__ __forceinline__ void publish(const Memory& memory) const {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float sum = state[j].sum;
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      if (t == 0) memory.maxima[group() * kHeads + head_of(j)] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (t != 0 || group() != 0) continue;
      const int head = head_of(j);
      memory.state[head] = make_float2(__fmul_rn(state[j].maximum, kScale),
                                       memory.maxima[head] + memory.maxima[kHeads + head]);
    }
    __syncthreads();
  }
};

// Starts the copies of a row's queries; zeros past the last head.
__device__ __forceinline__ void fetch_queries(const uint4* q, int row, uint4* queries) {
  for (int i = threadIdx.x; i < kHeads * kEntryUnits; i += kLatentThreads) {
    const int head = i / kEntryUnits, unit = i % kEntryUnits;
    const int q_head = static_cast<int>(blockIdx.y) * kHeads + head;
    const int64_t from = static_cast<int64_t>(row) * Q_HEADS + min(q_head, Q_HEADS - 1);
    const int to = unit / 8 * kHeads * 8 + head * 8 + ((unit % 8) ^ (head % 8));
    cp_async_16_or_zero(queries + to, q + from * kEntryUnits + unit, q_head < Q_HEADS);
  }
}

__device__ __forceinline__ void attend_row(const uint4* q, const uint4* c_pool,
                                           const LatentWalk& walk, const Memory& memory, int row,
                                           float2* slot_sums, float* slot_values) {
  TileCursor at = walk.begin(), ahead = at;
  int2 entries = walk.look_up(ahead);
  int filled = 0;
  const auto fetch_next = [&] {
    if (!ahead.ended()) {
      walk.fetch(c_pool, entries, memory.ring + filled * kStageUnits);
      filled = filled + 1 == STAGES ? 0 : filled + 1;
      walk.advance(ahead);
      entries = walk.look_up(ahead);
    }
    cp_async_commit();
  };
  fetch_queries(q, row, memory.queries);
#pragma unroll 1
  for (int i = 0; i < STAGES; ++i) fetch_next();
  Softmax softmax;
  Mixer<kMTiles> mixer;
  int stage = 0;
  for (int slot = blockIdx.x; slot < SPLIT; slot = next_slot(slot)) {
    if (slot >= SLOTS_IN_USE) continue;
    const bool any = at.slot() == slot;
    mixer.clear();
    softmax.clear();
    while (at.slot() == slot) {
      const uint4* tile = memory.ring + stage * kStageUnits;
      stage = stage + 1 == STAGES ? 0 : stage + 1;
      cp_async_wait<STAGES - 1>();
      fence_async_shared();
      __syncthreads();
      softmax.take_scores(memory, tile, walk.rows.span(0, 0), at.tile * kTile);
      __syncthreads();
      softmax.take_weights(memory);
      __syncthreads();
      mixer.add(memory.weights, memory.rescale, tile);
      __syncthreads();
      fetch_next();
      walk.advance(at);
    }
    softmax.publish(memory);
    mixer.end_slot(slot, any, memory.state, memory.joined, slot_sums, slot_values, [&](int head) {
      const int q_head = static_cast<int>(blockIdx.y) * kHeads + head;
      return q_head < Q_HEADS ? static_cast<int64_t>(row) * Q_HEADS + q_head : -1;
    });
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kLatentThreads, 1)
    attend_absorbed(const uint4* q, const uint4* c_pool, const int* page_table,
                    const int* row_start, const int* row_slot, const int* tree_start,
                    const int* ancestor_bits, const int* selected, const int* page_position,
                    float2* workspace_sums, float* workspace_values) {
  DYNAMIC_SHARED(unsigned char, shared);
  const Memory memory(shared);
  const int sequence = blockIdx.z / ROW_CTAS, row_cta = blockIdx.z % ROW_CTAS;
  pdl_launch_dependents();
  pdl_wait();
  const int begin = row_start[sequence], stop = row_start[sequence + 1];
  LatentWalk walk;
  walk.table = page_table + static_cast<int64_t>(sequence) * TABLE;
  for (int row = begin + row_cta; row < stop; row += ROW_CTAS) {
    walk.rows.open(row, 1, row_slot, tree_start[sequence], ancestor_bits);
    attend_row(q, c_pool, walk, memory, row, workspace_sums, workspace_values);
    cp_async_wait<0>();
    __syncthreads();
  }
}
