// MlaAttention with absorbed queries: one cache entry of a token is every head's key.
//
//   q              bf16 [T, Q_HEADS, ENTRY]
//   c_pool         bf16 [pages, 1, PAGE_SIZE, ENTRY]; the first VALUE columns are the value
//   page_table, row_start, … , selected, page_position   as in kernel.cu
//   workspace_sums    f32 [T, Q_HEADS, PLACES, 2, 2], out, of slots in use (latent_state.cuh)
//   workspace_values  f16 [T, Q_HEADS, PLACES, 8 · kStateUnits], out, of slots in use
//   workspace_counts  i32 [T], out: slots in use
//
// Grid (CTAs, groups of 64 heads). A CTA takes one slot of a row and 64 heads after another
// (latent_slots.cuh). Three warpgroups: one copies tiles of 64 tokens into a ring of two. Of the
// other two, one has the slot's even tiles and one the odd ones: S = Q·Cᵀ [64 heads, 64 tokens] by
// wgmma, and the weights, by the greatest score of the slot so far, to shared memory. Both then add
// every tile's weighted values, each to its half of the columns, in the order of the tiles: while
// one has scores, the other has sums. project_absorbed joins the slots.
//
// 2·ENTRY bytes and 128·(ENTRY + VALUE) operations a token, row and group of heads. A tile of 512 +
// 64 is 73.7 KB, 2.2 µs of an SM's share of 4.53 TB/s; S takes 1150 cycles of tensor cores (and all
// of the bandwidth of shared memory, where both of its operands lie), the sums 1030: 1.25 µs.
#include "../_device/attention_softmax.cuh"
#include "../_device/latent_copy.cuh"
#include "../_device/latent_slots.cuh"
#include "../_device/latent_state.cuh"
#include "../_device/ptx_ring.cuh"
#include "../_device/ptx_wgmma_shared.cuh"

namespace {

constexpr int kHeads = 64;
constexpr int kConsumers = 256, kThreads = kConsumers + kCopyThreads;
constexpr int kStages = 2;
constexpr int kEntrySteps = ENTRY / 16;
constexpr int kLastPanel = kEntryPanels - 1;
constexpr int kHeldSteps = kEntrySteps - 4 * kLastPanel;
constexpr int kQueryUnits = kHeads * 8;                      // of a panel
constexpr int kParts = kEntryPanels < 3 ? kEntryPanels : 3;  // of a tile, that arrive by themselves
constexpr int kOwnColumns = 64 * kOwnPanels;
constexpr float kScale = static_cast<float>(SCALE) * kLog2E;
constexpr int kConsumerRegisters = 232, kCopierRegisters = 40;
static_assert(2 * kConsumerRegisters + kCopierRegisters <= 3 * registers_at_entry(kThreads),
              "no more registers than there are");
static_assert(TILE == 64 && SCALE > 0 && VALUE % 16 == 0 && kOwnColumns <= 256, "see above");

// The last panel of the queries is held in registers; weights of odd tiles take its place.
struct Memory {
  uint4* ring;          // [kStages][kStageUnits]
  uint4* queries;       // [kEntryPanels][kHeads][8]
  uint4* even_weights;  // [kHeads][8]
  float* rescale;       // [2][kHeads]: what sums before a tile are multiplied by
  float* maxima;        // [2][kHeads]: of the scores up to a tile
  float* totals;        // [2][kHeads]
  Mbarrier* full;       // [kStages][kParts]
  Mbarrier* empty;      // [kStages]
  Mbarrier* weighed;    // [2]: weights are there
  Mbarrier* spent;      // [2]: weights are used up
  int* starts;          // [BATCH + 1]

  __device__ __forceinline__ explicit Memory(unsigned char* shared) {
    ring = reinterpret_cast<uint4*>(shared);
    queries = ring + kStages * kStageUnits;
    even_weights = queries + kEntryPanels * kQueryUnits;
    rescale = reinterpret_cast<float*>(even_weights + kQueryUnits);
    maxima = rescale + 2 * kHeads;
    totals = maxima + 2 * kHeads;
    full = reinterpret_cast<Mbarrier*>(totals + 2 * kHeads);
    empty = full + kStages * kParts;
    weighed = empty + kStages;
    spent = weighed + 2;
    starts = reinterpret_cast<int*>(spent + 2);
  }

  __device__ __forceinline__ uint4* weights(int parity) const {
    return parity == 0 ? even_weights : queries + kLastPanel * kQueryUnits;
  }

  __device__ __forceinline__ void open_barriers() const {
    for (int i = 0; i < kStages * kParts; ++i) mbarrier_init(full + i, kCopyThreads);
    for (int i = 0; i < kStages; ++i) mbarrier_init(empty + i, kConsumers / 32);
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(weighed + i, kConsumers / 64);
      mbarrier_init(spent + i, kConsumers / 32);
    }
    mbarrier_init_fence();
  }
};

// Panels in front of a part.
__device__ __forceinline__ constexpr int part_start(int part) {
  return part * kEntryPanels / kParts;
}

// The copying warpgroup.
__device__ __forceinline__ void copy_tiles(const uint4* c_pool, const RowInputs& in,
                                           const Memory& memory) {
  int filled = 0;
  Items items(in, memory.starts);
  while (items.advance()) {
    const int* table = in.page_table + static_cast<int64_t>(items.sequence) * TABLE;
    const Span sees = items.rows.span(0, 0);
    for (int tile = items.tile; tile < items.end; ++tile) {
      TileCopy copy;
      copy.look_up(c_pool, [&](int token) {
        if (!sees.holds(tile * kTile + token)) return -1;
        const int slot = items.rows.slot_of(tile * kTile + token, 0);
        return table[slot / PAGE_SIZE] * PAGE_SIZE + slot % PAGE_SIZE;
      });
      const int stage = filled % kStages, round = filled / kStages;
      if (round > 0) mbarrier_wait(memory.empty + stage, (round + 1) % 2);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        uint4* const to = memory.ring + stage * kStageUnits;
        copy.start<EVICT_FIRST != 0>(to, part_start(part), part_start(part + 1));
        cp_async_arrive(memory.full + stage * kParts + part);
      }
      ++filled;
    }
  }
}

// One of the two warpgroups that add up. Lane 4·g + t of warp w has heads 16w + 8j + g.
struct Adder {
  const Memory& memory;
  float sums[kOwnColumns / 2];  // of columns 8n + 2t, + 1 of this warpgroup's
  uint32_t held[kHeldSteps][4];
  float maximum[2];  // of the scores so far, before the scale
  float total[2];    // of the weights of this thread's keys
  int used;          // tiles of the CTA so far
  int even_used;     // those of them that were even ones of their slots

  __device__ __forceinline__ explicit Adder(const Memory& shared)
      : memory(shared), used(0), even_used(0) {}

  __device__ __forceinline__ static int group() {
    return static_cast<int>(threadIdx.x) / 128;
  }
  __device__ __forceinline__ static int head_of(int j) {
    return static_cast<int>(threadIdx.x) / 32 % 4 * 16 + 8 * j + threadIdx.x % 32 / 4;
  }
  // The first of this warpgroup's panels of values: where their number is odd, both have one.
  __device__ __forceinline__ static int first_panel() {
    return group() * (kValuePanels - kOwnPanels);
  }

  // How often a place of weights was used.
  __device__ __forceinline__ int uses(int parity) const {
    return parity == 0 ? even_used : used - even_used;
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kOwnColumns / 2; ++i) sums[i] = 0.0f;
#pragma unroll
    for (int j = 0; j < 2; ++j) maximum[j] = no_maximum(), total[j] = 0.0f;
  }

  // A row's queries, zeros past the last head; with both warpgroups, between items.
  __device__ __forceinline__ void load_queries(const uint4* q, int row) {
    named_barrier_sync(1, kConsumers);
    for (int i = threadIdx.x; i < kHeads * kEntryUnits; i += kConsumers) {
      const int head = i / kEntryUnits, unit = i % kEntryUnits;
      const int q_head = static_cast<int>(blockIdx.y) * kHeads + head;
      const int64_t from = static_cast<int64_t>(row) * Q_HEADS + min(q_head, Q_HEADS - 1);
      const int to = unit / 8 * kQueryUnits + head * 8 + ((unit % 8) ^ (head % 8));
      cp_async_16_or_zero(memory.queries + to, q + from * kEntryUnits + unit, q_head < Q_HEADS);
    }
    cp_async_commit();
    cp_async_wait<0>();
    fence_async_shared();
    named_barrier_sync(1, kConsumers);
    const int lane = threadIdx.x % 32, head = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < kHeldSteps; ++step) {
      const int unit = 2 * step + lane / 16;
      ldmatrix_x4(held[step],
                  memory.queries + kLastPanel * kQueryUnits + head * 8 + (unit ^ (head % 8)));
    }
    named_barrier_sync(1, kConsumers);
  }

  // S = Q·Cᵀ as the tile arrives: sums 4n + 2j, + 1 are head j's at tokens 8n + 2t, + 1.
  __device__ __forceinline__ void take_scores(float (&score)[32]) {
    const int stage = used % kStages, phase = used / kStages % 2;
    // A panel further is as many units of 16 bytes, which matrices count in.
    const uint64_t queries = wgmma_matrix(memory.queries);
    const uint64_t tokens = wgmma_matrix(memory.ring + stage * kStageUnits);
#pragma unroll
    for (int i = 0; i < 32; ++i) score[i] = 0.0f;
    wgmma_pin(held);
    wgmma_pin(score);
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      mbarrier_wait(memory.full + stage * kParts + part, phase);
      fence_async_shared();
#pragma unroll
      for (int panel = part_start(part); panel < part_start(part + 1); ++panel) {
        const uint64_t a = queries + panel * kQueryUnits, b = tokens + panel * kPanelUnits;
#pragma unroll
        for (int step = 0; step < 4 && 4 * panel + step < kEntrySteps; ++step) {
          if (panel < kLastPanel) {
            wgmma_bf16_shared(score, a + 2 * step, b + 2 * step);
          } else {
            wgmma_bf16<64>(score, held[step], b + 2 * step);
          }
        }
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(score);
  }

  // Scores of a tile become weights, for both warpgroups to see; ``added`` is what they come to.
  __device__ __forceinline__ void weigh(float (&score)[32], Span sees, int tile, int parity,
                                        float (&added)[2]) {
    const int t = threadIdx.x % 4, first = tile * kTile + 2 * t;
    if (tile * kTile < sees.first || tile * kTile + kTile - 1 > sees.last) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        if (!sees.holds(first + i / 4 * 8 + i % 2)) score[i] = no_maximum();
      }
    }
    float top[2] = {maximum[0], maximum[1]}, shift[2], factor[2];
#pragma unroll
    for (int i = 0; i < 32; ++i) top[i % 4 / 2] = fmaxf(top[i % 4 / 2], score[i]);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      top[j] = fmaxf(top[j], __shfl_xor_sync(kAllLanes, top[j], 1));
      top[j] = fmaxf(top[j], __shfl_xor_sync(kAllLanes, top[j], 2));
      const float base = finite_maximum(top[j]);
      shift[j] = -__fmul_rn(base, kScale);
      factor[j] = exp2_fast(__fmul_rn(maximum[j] - base, kScale));
      added[j] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      score[i] = exp2_fast(__fmaf_rn(score[i], kScale, shift[i % 4 / 2]));
      added[i % 4 / 2] += score[i];
    }
    if (uses(parity) > 0) mbarrier_wait(memory.spent + parity, (uses(parity) + 1) % 2);
    unsigned char* to = reinterpret_cast<unsigned char*>(memory.weights(parity)) + 4 * t;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int head = head_of(j);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        *reinterpret_cast<uint32_t*>(to + 16 * (head * 8 + (n ^ (head % 8)))) =
            pack_bf16x2(score[4 * n + 2 * j], score[4 * n + 2 * j + 1]);
      }
      if (t == 0) {
        memory.rescale[parity * kHeads + head] = factor[j];
        memory.maxima[parity * kHeads + head] = top[j];
      }
    }
    fence_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(memory.weighed + parity);
  }

  // sums = sums · rescale + weights · values of the next tile; ``added`` is this thread's part.
  __device__ __forceinline__ void add(int parity, const float (&added)[2]) {
    const int stage = used % kStages;
    mbarrier_wait(memory.weighed + parity, uses(parity) % 2);
    float factor[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      factor[j] = memory.rescale[parity * kHeads + head_of(j)];
      maximum[j] = memory.maxima[parity * kHeads + head_of(j)];
      total[j] = __fmaf_rn(total[j], factor[j], added[j]);
    }
    // Times 1 changes nothing.
    if (__any_sync(kAllLanes, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < kOwnColumns / 2; ++i) sums[i] *= factor[i % 4 / 2];
    }
    fence_async_shared();
    const uint64_t a = wgmma_matrix(memory.weights(parity));
    const uint64_t b = wgmma_columns(
        memory.ring + stage * kStageUnits + first_panel() * kPanelUnits, 16 * kPanelUnits);
    wgmma_pin(sums);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTile / 16; ++step) {
      wgmma_bf16_columns<kOwnColumns>(sums, a + 2 * step, b + (step * 16 * 128 >> 4));
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(sums);
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      mbarrier_arrive(memory.empty + stage);
      mbarrier_arrive(memory.spent + parity);
    }
    ++used;
    even_used += parity == 0;
  }

  // Whether this warpgroup leaves its columns 8n … 8n + 7: those of the middle panel are both's.
  __device__ __forceinline__ static bool leaves(int n) {
    const int column = first_panel() * 64 + 8 * n;
    if (VALUE % 64 != 0 && column >= VALUE) return false;
    return kValuePanels % 2 == 0 || group() == 0 || n >= 8;
  }

  // A slot's state goes to the workspaces.
  __device__ __forceinline__ void leave(int row, int slot, float2* slot_sums, uint4* slot_values) {
    const int t = threadIdx.x % 4;
    float greatest[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kOwnColumns / 2; ++i) {
      float& most = greatest[i % 4 / 2];
      if (leaves(i / 4)) most = fmaxf(most, fabsf(sums[i]));
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int lanes = 1; lanes < 4; lanes *= 2) {
        total[j] += __shfl_xor_sync(kAllLanes, total[j], lanes);
        greatest[j] = fmaxf(greatest[j], __shfl_xor_sync(kAllLanes, greatest[j], lanes));
      }
      if (t == 0) memory.totals[group() * kHeads + head_of(j)] = total[j];
    }
    named_barrier_sync(1, kConsumers);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int head = head_of(j), q_head = static_cast<int>(blockIdx.y) * kHeads + head;
      if (q_head >= Q_HEADS) continue;
      const int64_t place = (static_cast<int64_t>(row) * Q_HEADS + q_head) * PLACES + slot;
      const StateScale scale(greatest[j]);
      if (t == 0) {
        // Group 0 alone reads totals: what group 1 writes of the next slot waits for it.
        float first = __fmul_rn(maximum[j], kScale);
        if (group() == 0) first = memory.totals[head] + memory.totals[kHeads + head];
        slot_sums[2 * place + group()] = make_float2(first, scale.unit);
      }
      uint4* const to = slot_values + place * kStateUnits + first_panel() * 8 + t;
#pragma unroll
      for (int n = 0; n < kOwnColumns / 8; n += 4) {
        if (!leaves(n)) continue;
        uint32_t pair[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* own = sums + 4 * (n + i) + 2 * j;
          pair[i] = pack_f16x2(own[0] * scale.inverse, own[1] * scale.inverse);
          if (VALUE % 32 != 0 && !leaves(n + i)) pair[i] = 0;
        }
        to[n] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
      }
    }
  }
};

__device__ __forceinline__ void add_up(const uint4* q, const RowInputs& in, const Memory& memory,
                                       float2* slot_sums, uint4* slot_values) {
  Adder adder(memory);
  Items items(in, memory.starts);
  int loaded = -1;
  while (items.advance()) {
    if (items.row != loaded) adder.load_queries(q, items.row);
    loaded = items.row;
    const Span sees = items.rows.span(0, 0);
    adder.clear();
#pragma unroll 1
    for (int tile = items.tile; tile < items.end; ++tile) {
      const int parity = (tile - items.tile) % 2;
      float added[2] = {0.0f, 0.0f};
      if (parity == Adder::group()) {
        float score[32];
        adder.take_scores(score);
        adder.weigh(score, sees, tile, parity, added);
      }
      adder.add(parity, added);
    }
    adder.leave(items.row, items.slot, slot_sums, slot_values);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attend_absorbed(const uint4* q, const uint4* c_pool, const int* page_table,
                    const int* row_start, const int* row_slot, const int* tree_start,
                    const int* ancestor_bits, const int* selected, const int* page_position,
                    float2* workspace_sums, uint4* workspace_values, int* workspace_counts) {
  DYNAMIC_SHARED(unsigned char, shared);
  const Memory memory(shared);
  const RowInputs in{page_table, row_start, row_slot, tree_start, ancestor_bits};
  if (threadIdx.x == 0) memory.open_barriers();
  warm_inputs(in);
  pdl_launch_dependents();
  pdl_wait();
  count_items(in, memory.starts, kThreads, workspace_counts);
  if (threadIdx.x >= kConsumers) {
    registers_lower<kCopierRegisters>();
    copy_tiles(c_pool, in, memory);
  } else {
    registers_raise<kConsumerRegisters>();
    add_up(q, in, memory, workspace_sums, workspace_values);
  }
}
