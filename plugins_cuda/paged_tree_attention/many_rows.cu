// PagedTreeAttention for decoding where sequences have many rows, as they do when SpecPV feeds a
// buffer again: 32 rows of one KV head's query heads by wgmma, with the bits of kernel.cu.
//
//   q … ancestor_bits  as attend_split's (kernel.cu); heads are 64 wide, WINDOW is 0
//   workspace_sums    f32  [T, KV_HEADS, SLOTS, GROUP, 2], out, of slots that rows see
//   workspace_values  f32  [T, KV_HEADS, SLOTS, GROUP, WIDTH], out, likewise
//
// Grid (SLOTS, KV_HEADS, row tiles). A CTA has up to 32 rows of a sequence and a slot of the
// context. CTAs of a row tile stand next to each other, since only the last of a sequence's may
// have fewer rows: of one sequence what takes longest begins first. Each row tile reads keys anew,
// which is not what it waits for. CTAs without rows or keys leave at once. Four warpgroups take 8
// rows × 8 heads each, a fifth copies tiles of 32 keys and values into a ring, each of its warps
// every fourth. The scores of a tile run on the tensor cores together with the values of the one
// before (FlashAttention-3, arXiv 2407.08608, section 3.2), and one warpgroup's softmax beside the
// others' products.
//
// Why the bits are those of kernel.cu: a chain's tiles are taken one by one by that kernel's steps,
// and wgmma's sums of k16 products have the bits of mma's (measured: 3.7 million sums over three
// distributions). The chains of a slot join in order; join_slots (join_slots.cu) does the rest.
//
// 8 KB and 2.1 MFLOP a tile: 512 cycles of the tensor cores, 580 for its exponentials.
#include "../_device/chain_state.cuh"
#include "../_device/few_rows.cuh"

namespace {

constexpr int kGroups = 4;
constexpr int kGroupWarps = 4, kGroupThreads = 32 * kGroupWarps;
constexpr int kGroupRows = kGroupWarps * kWarpRows;
constexpr int kRows = kGroups * kGroupRows;
constexpr int kConsumers = kGroups * kGroupThreads;
constexpr int kThreads = kConsumers + 32 * kCopyWarps;
constexpr int kConsumerRegisters = 112, kProducerRegisters = 32;
static_assert(WIDTH == 64 && SLOTS > 1, "rows of 128 bytes; slots have workspaces");
static_assert(kGroups * kConsumerRegisters + kProducerRegisters <=
                  (kGroups + 1) * registers_at_entry(kThreads),
              "no more registers than there are");

// A warpgroup that attends for its 8 rows.
struct Consumer {
  Chain chain;
  Ring& ring;
  LowMatrix stages;
  const ManyRows& rows;
  int warp_row;   // the first of this warp's
  int full_last;  // shared positions up to here are seen by all rows of the warpgroup
  RingPlace place;

  __device__ __forceinline__ LowMatrix keys(int slot) const {
    return stages + slot * 2 * kTileUnits;
  }
  __device__ __forceinline__ LowMatrix values(int slot) const {
    return stages + (slot * 2 * kTileUnits + kTileUnits);
  }

  __device__ __forceinline__ void give_back(int slot) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&ring.empty[slot]);
  }

  // Waits for the next tile; false behind the last. Of a warpgroup's tiles no more than two are
  // kept meanwhile: to be given, a tile needs the stages of those that stand kBehind turns behind.
  __device__ __forceinline__ bool await(Tiles& tiles) {
    const bool more = tiles.advance();
    if (more) mbarrier_wait(&ring.full[place.slot], place.parity);
    return more;
  }

  // Whether only rows of other warpgroups see a tile.
  __device__ __forceinline__ bool passes(const Tiles& tiles) const {
    return tiles.own >= 0 && tiles.own / kGroupRows != warp_row / kGroupRows;
  }

  // Ends the scores of a tile, and makes them weights; what the values are to be multiplied by.
  template <int pending>
  __device__ __forceinline__ void weigh(int from, int own, float (&rescale)[kWarpRows]) {
    wgmma_wait<pending>();
    wgmma_pin(chain.scores());
    if (own >= 0 || from + kTile - 1 > full_last) {
      const int key = from + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
      for (int j = 0; j < kWarpRows; ++j) {
        const Span span = rows.seen(min(warp_row + j, rows.count - 1), own);
#pragma unroll
        for (int i = 0; i < kTile / 4; ++i) {
          const int position = key + i / 2 * 8 + i % 2;
          if (position >= span.first && position <= span.last) continue;
          chain.score[i / 2][2 * j + i % 2] = no_maximum();
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kWarpRows; ++j) {
      rescale[j] = weigh_tile(chain.score, j, kScale, chain.maximum[j], chain.sum[j]);
    }
  }

  // Times 1 changes nothing, which is what most tiles of a long chain multiply by.
  __device__ __forceinline__ void scale_values(const float (&by)[kWarpRows]) {
    if (!__any_sync(kAllLanes, by[0] != 1.0f || by[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < WIDTH / 2; ++i) chain.values[i / 4][i % 4] *= by[i % 4 / 2];
  }

  // The sums of a chain. Within the loop the wait for the next tile stands in front of the values',
  // which ptxas would move in front of the weights.
  __device__ __forceinline__ void run(Tiles tiles) {
    float rescale[kWarpRows];
    chain.clear();
    bool more = await(tiles);
#pragma unroll 1
    while (more) {
      int spent = place.slot;
      if (passes(tiles)) {
        give_back(spent);
        place.advance();
        more = await(tiles);
        continue;
      }
      chain.begin_scores(keys(spent));
      weigh<0>(tiles.from, tiles.own, rescale);
      scale_values(rescale);
      chain.pack();
      place.advance();
      more = await(tiles);
#pragma unroll 1
      while (more && !passes(tiles)) {
        const int from = tiles.from, own = tiles.own, slot = place.slot;
        chain.begin_scores(keys(slot));
        chain.begin_values(values(spent));
        weigh<1>(from, own, rescale);
        place.advance();
        more = await(tiles);
        chain.end_values();
        give_back(spent);
        spent = slot;
        scale_values(rescale);
        chain.pack();
      }
      chain.begin_values(values(spent));
      chain.end_values();
      give_back(spent);
    }
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attend_many(const uint32_t* q, const uint4* k_pool, const uint4* v_pool, const int* page_table,
                const int* row_start, const int* row_slot, const int* tree_start,
                const int* ancestor_bits, float2* workspace_sums, float4* workspace_values) {
  DYNAMIC_SHARED(uint4, stages);  // [STAGES][keys, values], from a multiple of 1024, and Held
  __shared__ Ring ring;
  __shared__ ManyRow opened[kRows];
  pdl_launch_dependents();
  pdl_wait();
  const RowTile own = row_tile<kRows>(row_start, static_cast<int>(blockIdx.z));
  if (own.count == 0 || is_few(row_start, own.sequence)) return;
  const int start = tree_start[own.sequence];
  if (threadIdx.x < kRows) {
    const int index = own.first + min(static_cast<int>(threadIdx.x), own.count - 1);
    opened[threadIdx.x] = open_many_row(index, row_slot, start, ancestor_bits);
  }
  const int groups = ceil_div(own.count, kGroupRows);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(&ring.full[i], 1);
      mbarrier_init(&ring.empty[i], groups * kGroupWarps);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  const ManyRows rows(opened, own.count, start);
  const int slot = static_cast<int>(blockIdx.x);
  if (slot >= rows.chunks()) return;
  const int group = static_cast<int>(threadIdx.x) / kGroupThreads;
  if (group == kGroups) {
    registers_lower<kProducerRegisters>();
    const int view = own.sequence * VIEWS + (VIEWS > 1 ? static_cast<int>(blockIdx.y) : 0);
    produce({k_pool, v_pool, page_table, ancestor_bits, view * TABLE}, rows, slot, ring, stages);
    return;
  }
  registers_raise<kConsumerRegisters>();
  if (group >= groups) return;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * kWarpRows;
  int full_last = opened[group * kGroupRows].shared;
  for (int i = 1; i < kGroupRows; ++i) {
    full_last = min(full_last, opened[group * kGroupRows + i].shared);
  }
  Consumer consumer{{}, ring, {wgmma_matrix(stages)}, rows, warp_row, full_last, {}};
  load_query_rows(consumer.chain.queries, q, opened + warp_row);
  const SlotStates slots{workspace_sums, workspace_values, nullptr, nullptr};
  const Held<kConsumers> held{reinterpret_cast<float4*>(stages + STAGES * 2 * kTileUnits) +
                              threadIdx.x};
  held.clear();
#pragma unroll 1
  for (int chain = 0; chain < kChains; ++chain) {
    consumer.run(Tiles(rows, slot, chain));
    held.join(consumer.chain);
  }
  held.leave(slots, own.first + warp_row, min(kWarpRows, own.count - warp_row), slot);
}
