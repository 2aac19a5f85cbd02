// PagedTreeAttention in prefill for rows without a window and heads of 64, 128 or 256: the query
// heads of 16 rows and one KV head (32 rows with up to 4 query heads per KV head) × tiles of 128,
// 64 or 32 keys, with wgmma.
//
//   q              bf16 [T, KV_HEADS·GROUP, WIDTH], rotated
//   k_pool, v_pool bf16 [pages, KV_HEADS/SHARE, PAGE_SIZE, WIDTH]
//   page_table     i32  [BATCH, VIEWS, TABLE]   VIEWS 1 or KV_HEADS/SHARE
//   row_start      i32  [BATCH + 1]
//   row_slot       i32  [T]
//   tree_start     i32  [BATCH]
//   ancestor_bits  i32  [T, WORDS]
//   sinks          f32  [KV_HEADS·GROUP], null without HAS_SINKS
//   selected       not used: null
//   attended       bf16 [T, KV_HEADS·GROUP, WIDTH], out
//
// Grid (row tiles, KV_HEADS), the tiles with most keys first; CTAs past the last tile return. Two
// warpgroups have half of the rows each, a third copies keys and values to a ring of STAGES stages.
// The scores of a tile run on the tensor cores together with the values of the previous tile
// (FlashAttention-3, arXiv 2407.08608, section 3.2), and the softmax of one warpgroup overlaps with
// the products of the other. Tiles start at multiples of their keys of the view, so a row's sums do
// not depend on its chunk. A tile has 32 KB and 4.2 MFLOP: 1024 cycles of the tensor cores, and as
// many for the 16384 exponentials with width 64, half for those with 128.
#include "../_device/ring_place.cuh"
#include "device/config.cuh"
#include "device/pool_row.cuh"
#include "device/prompt_rows.cuh"
#include "device/row_pair.cuh"

namespace {

constexpr int kGroups = 2;
constexpr int kGroupWarps = 4, kGroupThreads = 32 * kGroupWarps;
constexpr int kGroupRows = kGroupWarps * kWarpRows;
constexpr int kRows = kGroups * kGroupRows;
constexpr int kConsumers = kGroups * kGroupThreads;
constexpr int kThreads = kConsumers + kGroupThreads;
constexpr int kConsumerRegisters = 224, kProducerRegisters = 56;
constexpr int kKeys = Config::kKeys;
using StageRing = Ring<Config::kStages>;
using StagePlace = RingPlace<Config::kStages>;
constexpr int kTileUnits = kKeys * kUnits;
// Queries in shared memory: panels of 64 columns, per warpgroup.
constexpr int kGroupQueryUnits = kHoldsQueries ? 0 : kGroupQueries * kUnits;
static_assert(16 * (Config::kStages * 2 * kTileUnits + kGroups * kGroupQueryUnits) ==
                  Config::kSharedBytes,
              "the launch requests the stages, and the queries of the widest heads");
static_assert(kKeys * Config::kWidth == 8192 && Config::kWindow == 0,
              "32 KB per stage; rows have no window");
static_assert(kGroups * kConsumerRegisters + kProducerRegisters <=
                  (kGroups + 1) * registers_at_entry(kThreads),
              "no more registers than there are");

struct Pool {
  const uint4* keys;
  const uint4* values;
  const int* table;  // of this sequence and KV head
};

// Start this thread's part of the copies of a tile, with its values after it; zeros past `last`.
__device__ __forceinline__ void fetch(const Pool& pool, uint4* stage, int tile, int last) {
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
#pragma unroll 4
  for (int i = 0; i < kTileUnits / kGroupThreads; ++i) {
    const int key = (i * kGroupThreads + thread) / kUnits, unit = thread % kUnits;
    const int slot = tile * kKeys + key;
    const bool seen = slot <= last;
    int64_t entry = 0;
    if (seen) {
      const int64_t page = pool.table[slot / Config::kPageSize];
      entry =
          pool_row_of<Config::kKvHeads, Config::kShare, Config::kPageSize>(page, blockIdx.y, slot);
    }
    const int to = panel_unit<Config::kWidth, kKeys>(key, unit);
    cp_async_16_or_zero(stage + to, pool.keys + entry * kUnits + unit, seen);
    cp_async_16_or_zero(stage + kTileUnits + to, pool.values + entry * kUnits + unit, seen);
  }
  cp_async_commit();
}

// Copy the queries of all warpgroups, with all threads: zeros in places without a head.
__device__ __forceinline__ void copy_queries(uint4* queries, const uint4* q, const Row* rows) {
  for (int i = threadIdx.x; i < kGroups * kGroupQueryUnits; i += kThreads) {
    const int group = i / kGroupQueryUnits, of_group = i % kGroupQueryUnits / kUnits,
              unit = i % kUnits;
    const int half = of_group / kPlaces % kHalves, place = of_group % kPlaces;
    const int head = place % Mma::kHeads;
    const int row = (group * kGroupWarps + of_group / 16) * kWarpRows + half * Mma::kOfHalf +
                    place / Mma::kHeads;
    const bool is_real = head < Config::kGroup;
    const int64_t from =
        (static_cast<int64_t>(rows[row].index) * Config::kKvHeads + blockIdx.y) * Config::kGroup +
        (is_real ? head : 0);
    const int to = panel_unit<Config::kWidth, kGroupQueries>(of_group, unit);
    cp_async_16_or_zero(queries + group * kGroupQueryUnits + to, q + from * kUnits + unit, is_real);
  }
  cp_async_commit();
  cp_async_wait<0>();
  fence_async_shared();
  __syncthreads();
}

// A tile is passed to the consumers after the copies of the next one were issued.
__device__ __forceinline__ void produce(const Pool& pool, StageRing& ring, uint4* stages,
                                        int last) {
  StagePlace place, copied;
  const auto give = [&] {
    fence_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&ring.full[copied.slot]);
    copied.advance();
  };
  for (int tile = 0; tile <= last / kKeys; ++tile) {
    mbarrier_wait(&ring.empty[place.slot], place.parity ^ 1);
    fetch(pool, stages + place.slot * 2 * kTileUnits, tile, last);
    place.advance();
    if (tile > 0) {
      cp_async_wait<1>();
      give();
    }
  }
  cp_async_wait<0>();
  give();
}

// The loop of a warpgroup over the tiles of its rows.
struct Consumer {
  RowPair<kKeys> state;
  StageRing& ring;
  const uint4* stages;
  const Row* rows;  // this warp's
  int tree_start;
  const int* ancestor_bits;
  StagePlace place;

  __device__ __forceinline__ const uint4* stage() const {
    return stages + place.slot * 2 * kTileUnits;
  }

  __device__ __forceinline__ static uint64_t matrix(const uint4* tile) {
    return panel_matrix<Config::kWidth, kKeys>(tile);
  }

  __device__ __forceinline__ void give_back(int slot) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&ring.empty[slot]);
  }

  // Wait for the scores, convert them to weights, and return the factors of the values.
  template <bool hides, int pending>
  __device__ __forceinline__ float2 weigh_tile(int tile) {
    wgmma_wait<pending>();
    wgmma_pin(state.scores());
    if (hides) hide_unseen(state.score, rows, tile * kKeys, tree_start, ancestor_bits);
    const float first = weigh(state.score, 0, state.maximum[0], state.sum[0]);
    return make_float2(first, weigh(state.score, 1, state.maximum[1], state.sum[1]));
  }

  template <bool hides>
  __device__ __forceinline__ void open() {
    mbarrier_wait(&ring.full[place.slot], place.parity);
    state.begin_scores(matrix(stage()));
    weigh_tile<hides, 0>(0);
    state.pack();
  }

  // `place` is that of the previous tile. The wait for the next tile (the last one has none) also
  // keeps ptxas from moving the wait for the values before the weights.
  template <bool hides>
  __device__ __forceinline__ void step(int tile, bool is_last) {
    const uint4* before = stage() + kTileUnits;
    const int spent = place.slot;
    place.advance();
    state.begin_scores(matrix(stage()));
    state.begin_values(matrix(before));
    const float2 rescale = weigh_tile<hides, 1>(tile);
    StagePlace behind = place;
    if (!is_last) behind.advance();
    mbarrier_wait(&ring.full[behind.slot], behind.parity);
    state.end_values();
    give_back(spent);
#pragma unroll
    for (int i = 0; i < Config::kWidth / 2; ++i) {
      state.values[i / 4][i % 4] *= i % 4 < 2 ? rescale.x : rescale.y;
    }
    state.pack();
  }

  // Process tiles up to position `last`; those up to `full_last` are visible to all rows.
  __device__ __forceinline__ void run(int full_last, int last) {
    const int end = last / kKeys;
    if (full_last >= kKeys - 1) {
      open<false>();
    } else {
      open<true>();
    }
    if (end > 0) {
      StagePlace second = place;
      second.advance();
      mbarrier_wait(&ring.full[second.slot], second.parity);
    }
    int tile = 1;
    for (; tile * kKeys + kKeys - 1 <= full_last; ++tile) step<false>(tile, tile == end);
    for (; tile <= end; ++tile) step<true>(tile, tile == end);
    state.begin_values(matrix(stage() + kTileUnits));
    state.end_values();
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attend_full_prompt(const uint32_t* q, const uint4* k_pool, const uint4* v_pool,
                       const int* page_table, const int* row_start, const int* row_slot,
                       const int* tree_start, const int* ancestor_bits, const float* sinks,
                       const int* selected, uint32_t* attended) {
  DYNAMIC_SHARED(uint4, stages);  // [STAGES][keys, values], aligned to 1024; queries
  __shared__ StageRing ring;
  __shared__ Row rows[kRows];
  if (threadIdx.x == 0) {
    for (int i = 0; i < Config::kStages; ++i) {
      mbarrier_init(&ring.full[i], kGroupWarps);
      mbarrier_init(&ring.empty[i], kConsumers / 32);
    }
    mbarrier_init_fence();
  }
  pdl_launch_dependents();
  pdl_wait();
  const RowTile own =
      row_tile<Config::kBatch, kRows>(row_start, static_cast<int>(gridDim.x - 1 - blockIdx.x));
  if (own.count == 0) return;
  const int start = tree_start[own.sequence];
  if (threadIdx.x < kRows) {
    const int index = own.first + min(static_cast<int>(threadIdx.x), own.count - 1);
    rows[threadIdx.x] = open_row(index, row_slot, start, ancestor_bits + index * Config::kWords);
  }
  __syncthreads();
  uint4* const queries = stages + Config::kStages * 2 * kTileUnits;
  if constexpr (!kHoldsQueries) copy_queries(queries, reinterpret_cast<const uint4*>(q), rows);
  const int last = Sight(rows, kRows).end;
  const int warp = threadIdx.x / 32;
  if (warp >= kConsumers / 32) {
    registers_lower<kProducerRegisters>();
    const int view = own.sequence * Config::kViews +
                     (Config::kViews > 1 ? static_cast<int>(blockIdx.y) / Config::kShare : 0);
    produce({k_pool, v_pool, page_table + static_cast<int64_t>(view) * Config::kTable}, ring,
            stages, last);
    return;
  }
  registers_raise<kConsumerRegisters>();
  const int warp_row = warp * kWarpRows;
  Consumer consumer{{}, ring, stages, rows + warp_row, start, ancestor_bits};
  RowPair<kKeys>& state = consumer.state;
  state.clear();
  state.load_queries(q, rows + warp_row, queries + warp / kGroupWarps * kGroupQueryUnits);
  consumer.run(Sight(rows + warp / kGroupWarps * kGroupRows, kGroupRows).full_last, last);
#pragma unroll
  for (int j = 0; j < kHalves; ++j) {
    if (warp_row + j * Mma::kOfHalf >= own.count) break;
    const int row = warp_row + Mma::row(j);
    store_row(state.values, j, state.maximum[j], state.sum[j], rows[row], row < own.count, sinks,
              attended);
  }
}
