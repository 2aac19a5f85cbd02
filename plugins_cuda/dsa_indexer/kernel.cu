// DsaIndexer, first launch: scores of all cached keys, and histograms of their digits.
//
//   q              bf16 [T, HEADS, WIDTH]
//   head_weights   bf16 [T, HEADS], or null: every head has the weight 1
//   key_pool       bf16 or, KEY_BYTES 1, e4m3 [pages, 1, PAGE_SIZE, WIDTH]
//   page_table     i32  [B, views, table]
//   row_start      i32  [B + 1]
//   row_slot, positions  i32 [T]
//   tree_start, budget   i32 [B]
//   ancestor_bits  i32  [T, WORDS]
//   workspace_scores  f32 [T, views, score_stride]: of the slots that a row selects from
//   workspace_counts  i32 [T, views, kDigits], in and out: counts of these scores are added
//
// A warp holds 16 keys in registers as A of mma, and multiplies them by the heads of one row after
// another, eight per tile, from shared memory. Keys are thus read once for up to ROWS rows. The
// sums of a row do not depend on other rows. At 131k tokens a layer with keys of 64 values reads 17
// MB, 4 µs at 4.2 TB/s, or half of that in fp8, which is converted to bf16 in a few instructions.
// Four rows of four heads are 0.5 G products, which take less time on tensor cores.
//
// Memory latencies matter too. A warp has kAhead tiles of keys in flight, all of its tiles at 131k.
// It loads them while it computes the slots that its rows select from. Before griddepcontrol.wait
// it prefetches their lines to L2.
#include "../_device/bf16.cuh"
#include "../_device/e4m3.cuh"
#include "../_device/list_range.cuh"
#include "../_device/ptx_attention.cuh"
#include "device/config.cuh"
#include "device/digits.cuh"

constexpr int kWarps = Config::kThreads / 32;

constexpr int kBlocks = ceil_div(Config::kWidth, 32), kHeadTiles = ceil_div(Config::kHeads, 8);
// CTAs per SM, and tiles of keys of a warp in flight; wide keys need many registers.
constexpr int kCtas = Config::kWidth * kHeadTiles <= 256 ? 2 : 1;
constexpr int kAhead = Config::kWidth > 64 ? 1 : kHeadTiles > 1 ? 2 : 4;
constexpr int kKeys = 16, kStride = 32 * kBlocks + 32;  // of a query: rows lie in other banks
constexpr int kKeyBytes = Config::kWidth * Config::kKeyBytes, kTileBytes = kKeys * kKeyBytes;

// The first of the eight channels of a block in lane t. Of fp8 keys, a lane loads 16 channels at
// once, for two blocks.
constexpr bool kPaired = Config::kKeyBytes == 1 && Config::kWidth % 64 == 0;

__device__ __forceinline__ int channel_of(int block, int t) {
  return kPaired ? block / 2 * 64 + 16 * t + block % 2 * 8 : 32 * block + 8 * t;
}

// Convert eight e4m3 values to bf16.
__device__ __forceinline__ uint4 widened(uint32_t front, uint32_t back) {
  return make_uint4(e4m3x2_to_bf16x2(front), e4m3x2_to_bf16x2(front >> 16), e4m3x2_to_bf16x2(back),
                    e4m3x2_to_bf16x2(back >> 16));
}

// A lane's part of two keys of a tile, in the type of the cache.
struct Tile {
  static constexpr int kWords = 2 * Config::kKeyBytes;  // of a block
  uint32_t words[2][kWords * kBlocks];

  // Load zeros if there is no key.
  __device__ __forceinline__ void load(int half, const uint8_t* key, int t, bool there) {
    uint32_t (&own)[kWords * kBlocks] = words[half];
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int channel = channel_of(block, t), at = kWords * block;
      const uint8_t* from = key + channel * Config::kKeyBytes;
      const bool held = there && channel < Config::kWidth;
      if (kPaired || Config::kKeyBytes == 2) {
        if (kPaired && block % 2 == 1) continue;
        const uint4 v = held ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
        own[at] = v.x, own[at + 1] = v.y;
        if (at + 3 < kWords * kBlocks) own[at + 2] = v.z, own[at + 3] = v.w;
      } else {
        const uint2 v = held ? *reinterpret_cast<const uint2*>(from) : make_uint2(0, 0);
        own[at] = v.x, own[at + 1] = v.y;
      }
    }
  }

  __device__ __forceinline__ uint4 block(int half, int block) const {
    const uint32_t (&own)[kWords * kBlocks] = words[half];
    const int at = kWords * block;
    if (Config::kKeyBytes == 1) return widened(own[at], own[at + 1]);
    return make_uint4(own[at], own[at + 1], own[at + kWords / 2], own[at + kWords - 1]);
  }
};

// The keys of a sequence and view.
struct Keys {
  const uint8_t* pool;
  const int* pages;
  int table;

  // Prefetch the likely first tiles of the warp, before griddepcontrol.wait.
  __device__ __forceinline__ void warm(int first, int stride, int end) const {
    constexpr int kLines = ceil_div(kTileBytes, 128), kOfALane = ceil_div(kAhead * kLines, 32);
    if (Config::kPageSize % kKeys != 0) return;
    int slot[kOfALane], page[kOfALane];
#pragma unroll
    for (int i = 0; i < kOfALane; ++i) {
      slot[i] = first + (i * 32 + static_cast<int>(threadIdx.x) % 32) / kLines * stride;
      page[i] = slot[i] < end ? load_l2_int(pages + slot[i] / Config::kPageSize) : 0;
    }
#pragma unroll
    for (int i = 0; i < kOfALane; ++i) {
      const int line = (i * 32 + static_cast<int>(threadIdx.x) % 32) % kLines;
      const int64_t entry =
          static_cast<int64_t>(page[i]) * Config::kPageSize + slot[i] % Config::kPageSize;
      if (page[i] > 0) warm_l2(pool + entry * kKeyBytes + line * 128);
    }
  }

  // Return the pages of this lane's two keys of the tile from slot `first` on.
  __device__ __forceinline__ int2 look_up(int first) const {
    const int near = (first + static_cast<int>(threadIdx.x) % 32 / 4) / Config::kPageSize;
    const int far = (first + 8 + static_cast<int>(threadIdx.x) % 32 / 4) / Config::kPageSize;
    return make_int2(near < table ? load_l2_int(pages + near) : 0,
                     far < table ? load_l2_int(pages + far) : 0);
  }

  // Load the keys of slots below `end`.
  __device__ __forceinline__ void load(Tile& tile, int first, int2 page, int end) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int slot = first + 8 * half + static_cast<int>(threadIdx.x) % 32 / 4;
      const int64_t entry = static_cast<int64_t>(half == 0 ? page.x : page.y) * Config::kPageSize +
                            slot % Config::kPageSize;
      const bool there = slot < end;
      tile.load(half, pool + (there ? entry : 0) * kKeyBytes, threadIdx.x % 4, there);
    }
  }
};

// Sum over a row's heads for two keys of a tile, in the four lanes that share them.
__device__ __forceinline__ void sum_heads(const Tile& tile, const uint16_t* queries,
                                          const float* weights, float& low, float& high) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  low = high = 0.0f;
#pragma unroll
  for (int heads = 0; heads < kHeadTiles; ++heads) {
    const int head = 8 * heads;
    const uint16_t* own = queries + (head + g) * kStride;
    float products[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      // Lane t has the same eight channels of keys and queries, so their order does not matter.
      const uint4 x = tile.block(0, block), y = tile.block(1, block);
      const uint4 w = *reinterpret_cast<const uint4*>(own + channel_of(block, t));
      const uint32_t front[4] = {x.x, y.x, x.y, y.y}, back[4] = {x.z, y.z, x.w, y.w};
      const uint32_t by_front[2] = {w.x, w.y}, by_back[2] = {w.z, w.w};
      mma_bf16(products, front, by_front);
      mma_bf16(products, back, by_back);
    }
    const float one = weights[head + 2 * t], other = weights[head + 2 * t + 1];
    low = __fmaf_rn(one, max(products[0], 0.0f), low);
    low = __fmaf_rn(other, max(products[1], 0.0f), low);
    high = __fmaf_rn(one, max(products[2], 0.0f), high);
    high = __fmaf_rn(other, max(products[3], 0.0f), high);
  }
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    low += __shfl_xor_sync(kAllLanes, low, distance);
    high += __shfl_xor_sync(kAllLanes, high, distance);
  }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, kCtas)
    score_slots(const uint16_t* q, const uint16_t* head_weights, const uint8_t* key_pool,
                const int* page_table, const int* row_start, const int* row_slot,
                const int* tree_start, const int* ancestor_bits, const int* positions,
                const int* budget, float* workspace_scores, int* workspace_counts, int table,
                int threshold, int first_tokens, int recent_tokens) {
  DYNAMIC_SHARED(int, counts);  // [ROWS, kDigits], then the queries
  static_assert(
      Config::kRows * (4 * kDigits + 2 * 8 * kHeadTiles * kStride) == Config::kSharedBytes,
      "as the launch says");
  // See kStride.
  uint16_t* const queries = reinterpret_cast<uint16_t*>(counts + Config::kRows * kDigits);
  __shared__ float weights[Config::kRows][8 * kHeadTiles];
  // The slots that a row selects from; empty if it selects all.
  __shared__ int2 choices[Config::kRows];
  pdl_launch_dependents();
  const int view = blockIdx.y, views = gridDim.y, b = blockIdx.z;
  const int capacity = table * Config::kPageSize;
  const int64_t scores_of_a_list = score_stride(capacity);
  const Keys keys{key_pool, page_table + (static_cast<int64_t>(b) * views + view) * table, table};
  const int own_first = (static_cast<int>(blockIdx.x) * kWarps + threadIdx.x / 32) * kKeys;
  const int stride = gridDim.x * kWarps * kKeys;
  keys.warm(own_first, stride, min(load_l2_int(tree_start + b), capacity));
#pragma unroll 1
  for (int i = threadIdx.x; i < Config::kRows * kDigits / 4; i += Config::kThreads) {
    reinterpret_cast<uint4*>(counts)[i] = make_uint4(0, 0, 0, 0);
  }
  pdl_wait();
  const int allowed = load_l2_int(budget + b), end = load_l2_int(tree_start + b);
  const int first = load_l2_int(row_start + b), stop = load_l2_int(row_start + b + 1);
  int2 pages[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) pages[i] = keys.look_up(own_first + i * stride);
  // All of these loads are issued before the first use.
  __syncthreads();
  const int rows = allowed < 0 ? 0 : stop - first;
  for (int start = 0; start < rows; start += Config::kRows) {
    const int here = min(Config::kRows, rows - start);
    Tile tiles[kAhead];
    // The slots of the tree are not selected from.
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      keys.load(tiles[i], own_first + i * stride, pages[i], min(end, capacity));
    }
    // Other warps load queries, ranges of slots and weights, all at the same time.
#pragma unroll 1
    for (int i = threadIdx.x; i < here * 8 * kHeadTiles * kBlocks * 4; i += Config::kThreads) {
      const int part = i % (kBlocks * 4), head = i / (kBlocks * 4) % (8 * kHeadTiles);
      const int row = i / (kBlocks * 4) / (8 * kHeadTiles);
      const bool real = head < Config::kHeads && 8 * part < Config::kWidth;
      const int64_t at =
          static_cast<int64_t>(first + start + row) * Config::kHeads + (real ? head : 0);
      cp_async_16_or_zero(queries + (row * 8 * kHeadTiles + head) * kStride + 8 * part,
                          q + at * Config::kWidth + (real ? 8 * part : 0), real);
    }
    cp_async_commit();
    const int from_last = Config::kThreads - 1 - static_cast<int>(threadIdx.x);
    if (from_last < here) {
      const int row = first + start + from_last;
      const ListRange range = list_range<Config::kWords>(
          row_slot[row], end, ancestor_bits + static_cast<int64_t>(row) * Config::kWords,
          first_tokens, recent_tokens);
      const bool chooses = positions[row] >= threshold && allowed < range.others();
      choices[from_last] =
          chooses && allowed > 0 ? make_int2(range.low, range.late) : make_int2(0, 0);
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < here * 8 * kHeadTiles; i += Config::kThreads) {
      const int head = i % (8 * kHeadTiles), row = i / (8 * kHeadTiles);
      const int64_t at = static_cast<int64_t>(first + start + row) * Config::kHeads + head;
      const float weight =
          head_weights != nullptr && head < Config::kHeads ? bf16_to_float(head_weights[at]) : 1.0f;
      weights[row][head] = head < Config::kHeads ? weight : 0.0f;
    }
    cp_async_wait<0>();
    __syncthreads();
    int reach = 0;
    for (int row = 0; row < here; ++row) reach = max(reach, choices[row].y);
    // Score the tile from slot `key` on, for all rows.
    const auto score = [&](const Tile& tile, int key) {
#pragma unroll 1
      for (int row = 0; row < here; ++row) {
        const int2 among = choices[row];
        if (key >= among.y) continue;
        float low, high;
        sum_heads(tile, queries + row * 8 * kHeadTiles * kStride, weights[row], low, high);
        const int lane = threadIdx.x % 32, t = lane % 4, slot = key + lane / 4 + 8 * t;
        if (t < 2 && slot >= among.x && slot < among.y) {
          const float value = counted_score(t == 0 ? low : high);
          const int64_t place = static_cast<int64_t>(first + start + row) * views + view;
          workspace_scores[place * scores_of_a_list + slot] = value;
          atomicAdd(&counts[row * kDigits + digit_of(ordered_key(value))], 1);
        }
      }
    };
#pragma unroll 1
    for (int key = own_first; key < reach; key += kAhead * stride) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (key + i * stride < reach) score(tiles[i], key + i * stride);
      }
      const int next = key + kAhead * stride;
      if (next >= reach) break;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        keys.load(tiles[i], next + i * stride, keys.look_up(next + i * stride), reach);
      }
    }
    __syncthreads();
    for (int row = 0; row < here; ++row) {
      constexpr int kOfAThread = kDigits / Config::kThreads;
      const int64_t place = static_cast<int64_t>(first + start + row) * views + view;
      int own[kOfAThread];
#pragma unroll
      for (int i = 0; i < kOfAThread; ++i) {
        int& count = counts[row * kDigits + i * Config::kThreads + threadIdx.x];
        own[i] = count;
        count = 0;
      }
#pragma unroll
      for (int i = 0; i < kOfAThread; ++i) {
        int* all = workspace_counts + place * kDigits + i * Config::kThreads + threadIdx.x;
        if (own[i] > 0) atomicAdd(all, own[i]);
      }
    }
    __syncthreads();
    // The pages are loaded again, because tiles occupy the registers.
#pragma unroll
    for (int i = 0; i < kAhead && start + Config::kRows < rows; ++i) {
      pages[i] = keys.look_up(own_first + i * stride);
    }
  }
}
