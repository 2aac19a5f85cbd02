// PagedTreeAttention for prompt chunks: 16 rows (8 of width 128) of one KV head's query heads
// against tiles of keys.
//
//   q              bf16 [T, KV_HEADS·GROUP, WIDTH], rotated
//   k_pool, v_pool bf16 [pages, KV_HEADS, PAGE_SIZE, WIDTH]
//   page_table     i32  [BATCH, VIEWS, TABLE]   VIEWS 1 or KV_HEADS
//   row_start      i32  [BATCH + 1]
//   row_slot       i32  [T]
//   tree_start     i32  [BATCH]
//   ancestor_bits  i32  [T, WORDS]
//   sinks          f32  [KV_HEADS·GROUP], null without HAS_SINKS
//   selected       not taken: null
//   attended       bf16 [T, KV_HEADS·GROUP, WIDTH], out
//
// Grid (row tiles, KV_HEADS), the tiles with most keys first; CTAs past the last tile leave at
// once. Tiles of 64 keys lie at multiples of 64 of the view, so a row's sums do not depend on the
// chunk that it came in. Each of four warps owns 4 rows × 8 heads as two m16 tiles (one of width
// 128): S = Q·Kᵀ, then P·V, with P staying in registers. 4·64·WIDTH bytes and 4·128·64·WIDTH flops
// a tile. No workspace.
#include "../_device/attention_rows.cuh"
#include "../_device/attention_softmax.cuh"
#include "../_device/attention_tile.cuh"

namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kParts = WIDTH <= 64 ? 2 : 1;  // m16 tiles of a warp, two rows each
constexpr int kWarpRows = 2 * kParts;
constexpr int kRows = kWarps * kWarpRows;
constexpr int kHeads = 8;  // of 16 rows of an mma, twice; GROUP of them are real
constexpr int kKeys = 64;
constexpr int kUnits = WIDTH / 8;  // of 16 bytes, in a row of a tile
constexpr int kTileUnits = kKeys * kUnits;
constexpr int kSteps = WIDTH / 16;
constexpr float kScale = static_cast<float>(SCALE) * kLog2E;
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;
static_assert(GROUP <= kHeads && SCALE > 0, "one mma holds two rows of a KV head's heads");

// Rows first … first + count − 1 of the launch, of one sequence.
struct RowTile {
  int sequence, first, count;
};

// Row tile number `tile`, counting sequence by sequence; count 0 where there is none.
__device__ __forceinline__ RowTile row_tile(const int* row_start, int tile) {
  const int lane = threadIdx.x % 32;
  for (int base = 0; base < BATCH; base += 32) {
    const int sequence = base + lane;
    const int begin = sequence < BATCH ? row_start[sequence] : 0;
    const int rows = sequence < BATCH ? row_start[sequence + 1] - begin : 0;
    const int tiles = ceil_div(rows, kRows);
    int before = tiles;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kAllLanes, before, step);
      if (lane >= step) before += other;
    }
    before -= tiles;
    const bool mine = tile >= before && tile < before + tiles;
    const uint32_t found = __ballot_sync(kAllLanes, mine);
    if (found != 0u) {
      const int owner = __ffs(static_cast<int>(found)) - 1;
      const int offset = (tile - __shfl_sync(kAllLanes, before, owner)) * kRows;
      return {base + owner, __shfl_sync(kAllLanes, begin, owner) + offset,
              min(kRows, __shfl_sync(kAllLanes, rows, owner) - offset)};
    }
    tile -= __shfl_sync(kAllLanes, before + tiles, 31);
  }
  return {0, 0, 0};
}

// What a row sees, by view slot.
struct Row {
  int index;  // in the launch
  int first;  // of the window, a position
  int chain;  // the last committed slot
  int end;    // the last slot
};

__device__ __forceinline__ Row open_row(int index, const int* row_slot, int tree_start,
                                        const int* ancestors) {
  const RowView view = view_of<WORDS, WINDOW>(row_slot[index], tree_start, ancestors);
  const int nodes = view.last - tree_start;
  const int end = view.last < 0 ? view.chain : tree_start + set_bit<WORDS>(ancestors, nodes);
  return {index, view.first, view.chain, end};
}

__device__ __forceinline__ bool tree_sees(const Row& row, int tree_start, int slot,
                                          const int* ancestor_bits) {
  const int* ancestors = ancestor_bits + row.index * WORDS;
  const int bit = slot - tree_start;
  if (bit < 0 || bit >= 32 * WORDS) return false;
  if (!(static_cast<uint32_t>(ancestors[bit / 32]) >> (bit % 32) & 1u)) return false;
  return tree_start + bits_below<WORDS>(ancestors, bit) >= row.first;
}

struct Inputs {
  const uint32_t* q;
  const uint4* k_pool;
  const uint4* v_pool;
  const int* page_table;
  const int* row_slot;
  const int* tree_start;
  const int* ancestor_bits;
  const float* sinks;
};

// Starts the copies of a tile and, behind it, of its values; zeros outside of first … last.
__device__ __forceinline__ void fetch(const Inputs& in, const int* table, uint4* keys, int tile,
                                      int first, int last) {
#pragma unroll
  for (int i = 0; i < kTileUnits / kThreads; ++i) {
    const int key = (i * kThreads + static_cast<int>(threadIdx.x)) / kUnits;
    const int unit = static_cast<int>(threadIdx.x) % kUnits;
    const int slot = tile * kKeys + key;
    const bool seen = slot >= first && slot <= last;
    int64_t entry = 0;
    if (seen) {
      const int64_t page = table[slot / PAGE_SIZE];
      entry = (page * KV_HEADS + blockIdx.y) * PAGE_SIZE + slot % PAGE_SIZE;
    }
    const int to = tile_unit<WIDTH>(key, unit);
    cp_async_16_or_zero(keys + to, in.k_pool + entry * kUnits + unit, seen);
    cp_async_16_or_zero(keys + kTileUnits + to, in.v_pool + entry * kUnits + unit, seen);
  }
}

// The states of a warp's rows, as two m16 tiles. Lane 4·g + t has head g of rows 2·m (j = 0) and
// 2·m + 1 (j = 1), at columns 8·n + 2t, + 1.
struct States {
  float values[kParts][2 * kSteps][4];
  float maximum[kParts][2];  // of the scores, before the scale
  float sum[kParts][2];      // over this lane's keys

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < kParts; ++m) {
#pragma unroll
      for (int i = 0; i < 8 * kSteps; ++i) values[m][i / 4][i % 4] = 0.0f;
      maximum[m][0] = maximum[m][1] = no_maximum();
      sum[m][0] = sum[m][1] = 0.0f;
    }
  }

  // Scores become weights.
  __device__ __forceinline__ void weigh(int m, float (&score)[kKeys / 8][4]) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float top = maximum[m][j];
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        top = fmaxf(top, fmaxf(score[n][2 * j], score[n][2 * j + 1]));
      }
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
      const float base = finite_maximum(top);
      const float rescale = exp2_fast(__fmul_rn(maximum[m][j] - base, kScale));
      const float shift = -__fmul_rn(base, kScale);
      maximum[m][j] = top;
      float added = 0.0f;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        float& low = score[n][2 * j];
        float& high = score[n][2 * j + 1];
        low = exp2_fast(__fmaf_rn(low, kScale, shift));
        high = exp2_fast(__fmaf_rn(high, kScale, shift));
        added += low + high;
      }
      sum[m][j] = __fmaf_rn(sum[m][j], rescale, added);
#pragma unroll
      for (int n = 0; n < 2 * kSteps; ++n) {
        values[m][n][2 * j] *= rescale;
        values[m][n][2 * j + 1] *= rescale;
      }
    }
  }

  // values += weights · V
  __device__ __forceinline__ void add_values(const float (&score)[kParts][kKeys / 8][4],
                                             const uint4* values_tile) {
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      uint32_t a[kParts][4];
#pragma unroll
      for (int m = 0; m < kParts; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float (&pair)[4] = score[m][2 * k + i / 2];
          a[m][i] = pack_bf16x2(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
        }
      }
#pragma unroll
      for (int part = 0; part < kSteps; ++part) {
        uint32_t low[2], high[2];
        load_value_columns<WIDTH>(low, high, values_tile, 16 * k, part);
#pragma unroll
        for (int m = 0; m < kParts; ++m) {
          mma_bf16(values[m][2 * part], a[m], low);
          mma_bf16(values[m][2 * part + 1], a[m], high);
        }
      }
    }
  }
};

__device__ __forceinline__ void load_queries(uint32_t (&q)[kParts][kSteps][4],
                                             const uint32_t* queries, const Row* rows) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int m = 0; m < kParts; ++m) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int64_t head = (rows[2 * m + j].index * KV_HEADS + blockIdx.y) * GROUP + g;
      const uint32_t* from = queries + head * (WIDTH / 2) + t;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        q[m][step][j] = g < GROUP ? from[8 * step] : 0u;
        q[m][step][j + 2] = g < GROUP ? from[8 * step + 4] : 0u;
      }
    }
  }
}

// score = Q·Kᵀ
__device__ __forceinline__ void take_scores(float (&score)[kParts][kKeys / 8][4],
                                            const uint32_t (&q)[kParts][kSteps][4],
                                            const uint4* keys) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      uint32_t low[2], high[2];
      load_key_columns<WIDTH>(low, high, keys, 16 * n, step);
#pragma unroll
      for (int m = 0; m < kParts; ++m) {
        mma_bf16(score[m][2 * n], q[m][step], low);
        mma_bf16(score[m][2 * n + 1], q[m][step], high);
      }
    }
  }
}

__device__ __forceinline__ void hide_unseen(float (&score)[kParts][kKeys / 8][4], const Row* rows,
                                            int tile, int tree_start, const int* ancestor_bits) {
  const int from = tile * kKeys + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int m = 0; m < kParts; ++m) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const Row row = rows[2 * m + j];
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) {
        const int slot = from + i / 2 * 8 + i % 2;
        bool sees = slot >= row.first && slot <= row.chain;
        if (slot >= tree_start && slot <= row.end) {
          sees = tree_sees(row, tree_start, slot, ancestor_bits);
        }
        if (!sees) score[m][i / 2][2 * j + i % 2] = no_maximum();
      }
    }
  }
}

__device__ __forceinline__ void store(const States& states, const Row* rows, int count,
                                      const float* sinks, uint32_t* attended) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int m = 0; m < kParts; ++m) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float sum = states.sum[m][j];
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      if (2 * m + j >= count || g >= GROUP) continue;
      Part all{__fmul_rn(states.maximum[m][j], kScale), sum, make_float4(1.0f, 0.0f, 0.0f, 0.0f)};
      if (HAS_SINKS) join_sink(all, sinks[blockIdx.y * GROUP + g]);
      const float scale = all.sum > 0.0f ? all.values.x / all.sum : 0.0f;
      const int64_t head = (rows[2 * m + j].index * KV_HEADS + blockIdx.y) * GROUP + g;
      uint32_t* to = attended + head * (WIDTH / 2) + t;
#pragma unroll
      for (int n = 0; n < 2 * kSteps; ++n) {
        const float (&v)[4] = states.values[m][n];
        to[4 * n] = pack_bf16x2(v[2 * j] * scale, v[2 * j + 1] * scale);
      }
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    attend_prompt(const uint32_t* q, const uint4* k_pool, const uint4* v_pool,
                  const int* page_table, const int* row_start, const int* row_slot,
                  const int* tree_start, const int* ancestor_bits, const float* sinks,
                  const int* selected, uint32_t* attended) {
  DYNAMIC_SHARED(uint4, ring);  // [2][keys, values]
  __shared__ Row rows[kRows];
  pdl_launch_dependents();
  pdl_wait();
  const Inputs in{q, k_pool, v_pool, page_table, row_slot, tree_start, ancestor_bits, sinks};
  const RowTile own = row_tile(row_start, static_cast<int>(gridDim.x - 1 - blockIdx.x));
  if (own.count == 0) return;
  const int start = tree_start[own.sequence];
  if (threadIdx.x < kRows) {
    const int index = own.first + min(static_cast<int>(threadIdx.x), own.count - 1);
    rows[threadIdx.x] = open_row(index, row_slot, start, ancestor_bits + index * WORDS);
  }
  __syncthreads();
  int first = rows[0].first, end = rows[0].end;
  for (int row = 1; row < own.count; ++row) {
    first = min(first, rows[row].first);
    end = max(end, rows[row].end);
  }
  const int view = own.sequence * VIEWS + (VIEWS > 1 ? static_cast<int>(blockIdx.y) : 0);
  const int* table = page_table + static_cast<int64_t>(view) * TABLE;
  const int warp_row = threadIdx.x / 32 * kWarpRows;
  const Row* mine = rows + warp_row;
  int warp_first = mine[0].first, warp_end = mine[0].end;
  int full_first = mine[0].first, full_last = mine[0].chain;
  for (int row = 1; row < kWarpRows; ++row) {
    warp_first = min(warp_first, mine[row].first);
    warp_end = max(warp_end, mine[row].end);
    full_first = max(full_first, mine[row].first);
    full_last = min(full_last, mine[row].chain);
  }
  int stage = 0;
  fetch(in, table, ring, first / kKeys, first, end);
  cp_async_commit();
  uint32_t queries[kParts][kSteps][4];
  load_queries(queries, q, mine);
  States states;
  states.clear();
  for (int tile = first / kKeys; tile <= end / kKeys; ++tile) {
    cp_async_wait<0>();
    __syncthreads();
    if (tile < end / kKeys) {
      fetch(in, table, ring + (stage ^ 1) * 2 * kTileUnits, tile + 1, first, end);
    }
    cp_async_commit();
    const uint4* keys = ring + stage * 2 * kTileUnits;
    stage ^= 1;
    const int from = tile * kKeys, to = from + kKeys - 1;
    if (to < warp_first || from > warp_end) continue;
    float score[kParts][kKeys / 8][4] = {};
    take_scores(score, queries, keys);
    if (from < full_first || to > full_last) hide_unseen(score, mine, tile, start, ancestor_bits);
#pragma unroll
    for (int m = 0; m < kParts; ++m) states.weigh(m, score[m]);
    states.add_values(score, keys + kTileUnits);
  }
  store(states, mine, own.count - warp_row, sinks, attended);
}
