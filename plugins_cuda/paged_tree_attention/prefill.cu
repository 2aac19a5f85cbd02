// PagedTreeAttention in prefill: the query heads of 16 rows and one KV head × tiles of keys (8 rows
// with wide heads; twice as many rows with up to 4 query heads per KV head).
//
//   q              bf16 [T, KV_HEADS·GROUP, WIDTH], rotated
//   k_pool, v_pool bf16 [pages, KV_HEADS/SHARE, PAGE_SIZE, WIDTH], with CODES e4m3
//   page_table     i32  [BATCH, VIEWS, TABLE]   VIEWS 1 or KV_HEADS/SHARE
//   row_start      i32  [BATCH + 1]
//   row_slot       i32  [T]
//   tree_start     i32  [BATCH]
//   ancestor_bits  i32  [T, WORDS]
//   sinks          f32  [KV_HEADS·GROUP], null without HAS_SINKS
//   selected       not used: null
//   attended       bf16 [T, KV_HEADS·GROUP, WIDTH], out
//
// Grid (row tiles, KV_HEADS), the tiles with most keys first; CTAs past the last tile return. Tiles
// of 64 keys (32 with CODES) start at multiples of 64 of the view, so a row's sums do not depend on
// its chunk. Each of four warps has 4 rows × 8 heads as two m16 tiles (one with width 128): S =
// Q·Kᵀ, then P·V, with P in registers. A tile has 4·64·WIDTH bytes and 4·128·64·WIDTH FLOP. With
// heads of 256, eight warps and tiles of 32 keys are used, and queries are in shared memory.
#include "device/config.cuh"
#include "device/pool_row.cuh"
#include "device/prompt_rows.cuh"

namespace {

constexpr bool kIsWidest = Config::kWidth > 128;
constexpr int kWarps = kIsWidest ? 8 : 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kParts = Config::kWidth <= 64 ? 2 : 1;  // m16 tiles of a warp, two rows each
constexpr int kWarpRows = Mma::kAll * kParts;
constexpr int kRows = kWarps * kWarpRows;
// Quantized operands need more registers, as do the sums of heads of 256.
constexpr int kKeys = Config::kCodes || kIsWidest ? 32 : 64;
constexpr int kTileUnits = kKeys * kRowUnits;
constexpr int kSteps = Config::kWidth / 16;
// Query operands in shared memory, 16 bytes per lane, for the widest heads: their sums need the
// registers.
constexpr int kQueryUnits = kIsWidest ? kWarps * kSteps * 32 : 0;
static_assert(16 * (2 * 2 * kTileUnits + kQueryUnits) == Config::kSharedBytes,
              "the launch requests two stages, and the queries of the widest heads");

struct Pool {
  const uint4* keys;
  const uint4* values;
  const int* table;  // of this sequence and KV head
};

// Start to copy a tile, with its values after it; zeros outside of first … last.
__device__ __forceinline__ void fetch(const Pool& pool, uint4* keys, int tile, int first,
                                      int last) {
  constexpr int kAll = kKeys * kUnits, kCopies = ceil_div(kAll, kThreads);
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    const int key = (i * kThreads + static_cast<int>(threadIdx.x)) / kUnits;
    if constexpr (kAll % kThreads != 0) {
      if (key >= kKeys) break;
    }
    const int turn = kThreads % kUnits == 0 ? 0 : i * kThreads;
    const int unit = (turn + static_cast<int>(threadIdx.x)) % kUnits;
    const int slot = tile * kKeys + key;
    const bool seen = slot >= first && slot <= last;
    int64_t entry = 0;
    if (seen) {
      const int64_t page = pool.table[slot / Config::kPageSize];
      entry =
          pool_row_of<Config::kKvHeads, Config::kShare, Config::kPageSize>(page, blockIdx.y, slot);
    }
    const int to = tile_unit<kCacheWords>(key, unit);
    cp_async_16_or_zero(keys + to, pool.keys + entry * kUnits + unit, seen);
    cp_async_16_or_zero(keys + kTileUnits + to, pool.values + entry * kUnits + unit, seen);
  }
}

// The states of a warp's rows, as m16 tiles of two rows, with the columns of cache_tile.cuh.
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

  // Convert scores to weights.
  __device__ __forceinline__ void take(int m, float (&score)[kKeys / 8][4]) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float rescale = weigh(score, j, maximum[m][j], sum[m][j]);
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
          a[m][i] = pack_weights(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
        }
      }
      if constexpr (Config::kCodes) {
        add_codes(a, values_tile, 16 * k + value_row());
      } else {
        add_bf16(a, values_tile, 16 * k);
      }
    }
  }

 private:
  // For 16 values from `key` on.
  __device__ __forceinline__ void add_bf16(const uint32_t (&weight)[kParts][4],
                                           const uint4* values_tile, int key) {
#pragma unroll
    for (int part = 0; part < kSteps; ++part) {
      uint32_t low[2], high[2];
      load_value_columns<Config::kWidth>(low, high, values_tile, key, part);
#pragma unroll
      for (int m = 0; m < kParts; ++m) {
        multiply(values[m][2 * part], weight[m], low);
        multiply(values[m][2 * part + 1], weight[m], high);
      }
    }
  }

  // The same for quantized values; `row` is this lane's row of the tile.
  __device__ __forceinline__ void add_codes(const uint32_t (&weight)[kParts][4],
                                            const uint4* values_tile, int row) {
#pragma unroll
    for (int pair = 0; pair < kSteps / 2; ++pair) {
      uint32_t codes[2][2];
      load_value_codes(codes, values_tile, row, pair);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t even[2], odd[2];
        value_operands(even, odd, codes[i]);
#pragma unroll
        for (int m = 0; m < kParts; ++m) {
          multiply(values[m][4 * pair + 2 * i], weight[m], even);
          multiply(values[m][4 * pair + 2 * i + 1], weight[m], odd);
        }
      }
    }
  }
};

// score = Q·Kᵀ for quantized keys.
__device__ __forceinline__ void take_scores_of_codes(float (&score)[kParts][kKeys / 8][4],
                                                     const uint32_t (&q)[kParts][kSteps][4],
                                                     const uint4* keys) {
#pragma unroll
  for (int pair = 0; pair < kSteps / 2; ++pair) {
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      uint32_t first[2], second[2];
      load_key_codes(first, second, keys, 16 * n + key_row(), pair);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t low[2], high[2];
        key_operand(low, first[i]);
        key_operand(high, second[i]);
#pragma unroll
        for (int m = 0; m < kParts; ++m) {
          multiply(score[m][2 * n], q[m][2 * pair + i], low);
          multiply(score[m][2 * n + 1], q[m][2 * pair + i], high);
        }
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
      load_key_columns<Config::kWidth>(low, high, keys, 16 * n, step);
#pragma unroll
      for (int m = 0; m < kParts; ++m) {
        multiply(score[m][2 * n], q[m][step], low);
        multiply(score[m][2 * n + 1], q[m][step], high);
      }
    }
  }
}

// The same of queries that each lane has left in shared memory.
__device__ __forceinline__ void take_scores_by(float (&score)[kKeys / 8][4], const uint4* queries,
                                               const uint4* keys) {
#pragma unroll 4
  for (int step = 0; step < kSteps; ++step) {
    const uint4 four = queries[32 * step];
    const uint32_t q[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      uint32_t low[2], high[2];
      load_key_columns<Config::kWidth>(low, high, keys, 16 * n, step);
      multiply(score[2 * n], q, low);
      multiply(score[2 * n + 1], q, high);
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kIsWidest ? 1 : 2)
    attend_prompt(const uint32_t* q, const uint4* k_pool, const uint4* v_pool,
                  const int* page_table, const int* row_start, const int* row_slot,
                  const int* tree_start, const int* ancestor_bits, const float* sinks,
                  const int* selected, uint32_t* attended) {
  DYNAMIC_SHARED(uint4, ring);  // [2][keys, values]
  __shared__ Row rows[kRows];
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
  const Sight all(rows, kRows);
  const int warp_row = threadIdx.x / 32 * kWarpRows;
  const Row* mine = rows + warp_row;
  const Sight sight(mine, kWarpRows);
  const int view = own.sequence * Config::kViews +
                   (Config::kViews > 1 ? static_cast<int>(blockIdx.y) / Config::kShare : 0);
  const Pool pool{k_pool, v_pool, page_table + static_cast<int64_t>(view) * Config::kTable};
  int stage = 0;
  fetch(pool, ring, all.first / kKeys, all.first, all.end);
  cp_async_commit();
  uint32_t queries[kParts][kSteps][4];
#pragma unroll
  for (int m = 0; m < kParts; ++m) load_query_rows(queries[m], q, mine + Mma::kAll * m);
  uint4* const own_queries =
      ring + 2 * 2 * kTileUnits + threadIdx.x / 32 * kSteps * 32 + threadIdx.x % 32;
  if constexpr (kIsWidest) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t (&four)[4] = queries[0][step];
      own_queries[32 * step] = make_uint4(four[0], four[1], four[2], four[3]);
    }
  }
  States states;
  states.clear();
  for (int tile = all.first / kKeys; tile <= all.end / kKeys; ++tile) {
    cp_async_wait<0>();
    __syncthreads();
    if (tile < all.end / kKeys) {
      fetch(pool, ring + (stage ^ 1) * 2 * kTileUnits, tile + 1, all.first, all.end);
    }
    cp_async_commit();
    const uint4* keys = ring + stage * 2 * kTileUnits;
    stage ^= 1;
    const int from = tile * kKeys, to = from + kKeys - 1;
    if (to < sight.first || from > sight.end) continue;
    float score[kParts][kKeys / 8][4] = {};
    if constexpr (Config::kCodes) {
      take_scores_of_codes(score, queries, keys);
    } else if constexpr (kIsWidest) {
      take_scores_by(score[0], own_queries, keys);
    } else {
      take_scores(score, queries, keys);
    }
    const bool full = from >= sight.full_first && to <= sight.full_last;
#pragma unroll
    for (int m = 0; m < kParts; ++m) {
      if (!full) hide_unseen(score[m], mine + Mma::kAll * m, from, start, ancestor_bits);
      states.take(m, score[m]);
    }
    states.add_values(score, keys + kTileUnits);
  }
#pragma unroll
  for (int half = 0; half < kHalves * kParts; ++half) {
    if (warp_row + half * Mma::kOfHalf >= own.count) break;
    const int m = half / kHalves, j = half % kHalves, row = Mma::kAll * m + Mma::row(j);
    store_row(states.values[m], j, states.maximum[m][j], states.sum[m][j], mine[row],
              warp_row + row < own.count, sinks, attended);
  }
}
