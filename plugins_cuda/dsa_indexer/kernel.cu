// DsaIndexer, first launch: scores of all cached keys, and how many of them have which digit.
//
//   q              bf16 [T, HEADS, WIDTH]
//   head_weights   bf16 [T, HEADS], or null: every head counts once
//   key_pool       bf16 or, KEY_BYTES 1, e4m3 [pages, 1, PAGE_SIZE, WIDTH]
//   page_table     i32  [B, views, table]
//   row_start      i32  [B + 1]
//   row_slot, positions  i32 [T]
//   tree_start, budget   i32 [B]
//   ancestor_bits  i32  [T, WORDS]
//   workspace_scores  f32 [T, views, capacity]: of the slots that a row chooses among
//   workspace_counts  i32 [T, views, kDigits], in and out: grow by what a row chooses among
//
// A warp holds 16 keys in registers as A of mma, and meets the heads of one row after another,
// eight to a tile, from shared memory: keys are read once for as many rows as it holds. A row's
// sums do not depend on the others. At 131k a layer with keys of 64 reads 17 MB, 4 µs at 4.2 TB/s,
// or half of that in fp8, whose values become bf16 in a few operations;
// four rows of four heads are 0.5 G products, of which the tensor cores take a fraction of that.
#include "../_device/bf16.cuh"
#include "../_device/e4m3.cuh"
#include "../_device/list_range.cuh"
#include "../_device/ptx.cuh"
#include "digits.cuh"

constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr int kWarps = THREADS / 32;

constexpr int kBlocks = ceil_div(WIDTH, 32), kHeadTiles = ceil_div(HEADS, 8);
// CTAs of an SM: wide keys fill many registers.
constexpr int kCtas = WIDTH <= 64 ? 3 : WIDTH * kHeadTiles <= 256 ? 2 : 1;
constexpr int kKeys = 16, kStride = 32 * kBlocks + 32;  // of a query: rows lie in other banks

// The first of the eight channels that lane t has of a block. Of fp8 keys it loads 16 at once, for
// two blocks.
constexpr bool kPaired = KEY_BYTES == 1 && WIDTH % 64 == 0;

__device__ __forceinline__ int channel_of(int block, int t) {
  return kPaired ? block / 2 * 64 + 16 * t + block % 2 * 8 : 32 * block + 8 * t;
}

// Eight e4m3 as bf16.
__device__ __forceinline__ uint4 widened(uint32_t front, uint32_t back) {
  return make_uint4(e4m3x2_to_bf16x2(front), e4m3x2_to_bf16x2(front >> 16), e4m3x2_to_bf16x2(back),
                    e4m3x2_to_bf16x2(back >> 16));
}

// This lane's part of a key; zeros where there is none.
__device__ __forceinline__ void load_key(uint4 (&key)[kBlocks], const uint8_t* own, int t,
                                         bool there) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const int channel = channel_of(block, t);
    const uint8_t* from = own + channel * KEY_BYTES;
    const bool held = there && channel < WIDTH;
    if (kPaired) {
      if (block % 2 == 1) continue;
      const uint4 bytes = held ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
      key[block] = widened(bytes.x, bytes.y);
      key[block + 1 < kBlocks ? block + 1 : block] = widened(bytes.z, bytes.w);
    } else if (KEY_BYTES == 1) {
      const uint2 bytes = held ? *reinterpret_cast<const uint2*>(from) : make_uint2(0, 0);
      key[block] = widened(bytes.x, bytes.y);
    } else {
      key[block] = held ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, kCtas)
    score_slots(const uint16_t* q, const uint16_t* head_weights, const uint8_t* key_pool,
                const int* page_table, const int* row_start, const int* row_slot,
                const int* tree_start, const int* ancestor_bits, const int* positions,
                const int* budget, float* workspace_scores, int* workspace_counts, int table,
                int threshold, int first_tokens, int recent_tokens) {
  DYNAMIC_SHARED(int, counts);  // [ROWS, kDigits], and behind them
  uint16_t* const queries = reinterpret_cast<uint16_t*>(counts + ROWS * kDigits);  // see kStride
  __shared__ float weights[ROWS][8 * kHeadTiles];
  __shared__ int2 choices[ROWS];  // the slots that a row chooses among; none where it need not
  pdl_launch_dependents();
  pdl_wait();
  const int view = blockIdx.y, views = gridDim.y, b = blockIdx.z;
  if (budget[b] < 0) return;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first = row_start[b], rows = row_start[b + 1] - first, end = tree_start[b];
  const int64_t capacity = static_cast<int64_t>(table) * PAGE_SIZE;
  const int* pages = page_table + (static_cast<int64_t>(b) * views + view) * table;
  for (int start = 0; start < rows; start += ROWS) {
    const int here = min(ROWS, rows - start);
    __syncthreads();
    if (threadIdx.x < here) {
      const int row = first + start + threadIdx.x;
      const ListRange range =
          list_range<WORDS>(row_slot[row], end, ancestor_bits + static_cast<int64_t>(row) * WORDS,
                            first_tokens, recent_tokens);
      const bool chooses = positions[row] >= threshold && budget[b] < range.others();
      choices[threadIdx.x] =
          chooses && budget[b] > 0 ? make_int2(range.low, range.late) : make_int2(0, 0);
    }
    for (int i = threadIdx.x; i < here * kDigits / 4; i += THREADS) {
      reinterpret_cast<uint4*>(counts)[i] = make_uint4(0, 0, 0, 0);
    }
    for (int i = threadIdx.x; i < here * 8 * kHeadTiles * kBlocks * 4; i += THREADS) {
      const int part = i % (kBlocks * 4), head = i / (kBlocks * 4) % (8 * kHeadTiles);
      const int row = i / (kBlocks * 4) / (8 * kHeadTiles);
      uint4 value = make_uint4(0, 0, 0, 0);
      if (head < HEADS && 8 * part < WIDTH) {
        const int64_t at = static_cast<int64_t>(first + start + row) * HEADS + head;
        value = *reinterpret_cast<const uint4*>(q + at * WIDTH + 8 * part);
      }
      uint16_t* own = queries + (row * 8 * kHeadTiles + head) * kStride + 8 * part;
      *reinterpret_cast<uint4*>(own) = value;
    }
    for (int i = threadIdx.x; i < here * 8 * kHeadTiles; i += THREADS) {
      const int head = i % (8 * kHeadTiles), row = i / (8 * kHeadTiles);
      const int64_t at = static_cast<int64_t>(first + start + row) * HEADS + head;
      const float weight =
          head_weights != nullptr && head < HEADS ? bf16_to_float(head_weights[at]) : 1.0f;
      weights[row][head] = head < HEADS ? weight : 0.0f;
    }
    __syncthreads();
    int reach = 0;
    for (int row = 0; row < here; ++row) reach = max(reach, choices[row].y);
    const int stride = gridDim.x * kWarps * kKeys;
#pragma unroll 1
    for (int key = (blockIdx.x * kWarps + threadIdx.x / 32) * kKeys; key < reach; key += stride) {
      uint4 keys[2][kBlocks];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int slot = key + g + 8 * half;
        const int64_t page = slot < reach ? pages[slot / PAGE_SIZE] : 0;
        const int64_t entry = page * PAGE_SIZE + slot % PAGE_SIZE;
        load_key(keys[half], key_pool + entry * WIDTH * KEY_BYTES, t, slot < reach);
      }
      for (int row = 0; row < here; ++row) {
        const int2 among = choices[row];
        if (key >= among.y) continue;
        float low = 0.0f, high = 0.0f;
#pragma unroll
        for (int tile = 0; tile < kHeadTiles; ++tile) {
          const int head = 8 * tile;
          const uint16_t* own = queries + (row * 8 * kHeadTiles + head + g) * kStride;
          float products[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
          for (int block = 0; block < kBlocks; ++block) {
            // Lane t has the same eight channels of keys and queries: any order of them will do.
            const uint4 x = keys[0][block], y = keys[1][block];
            const uint4 w = *reinterpret_cast<const uint4*>(own + channel_of(block, t));
            const uint32_t front[4] = {x.x, y.x, x.y, y.y}, back[4] = {x.z, y.z, x.w, y.w};
            const uint32_t by_front[2] = {w.x, w.y}, by_back[2] = {w.z, w.w};
            mma_bf16(products, front, by_front);
            mma_bf16(products, back, by_back);
          }
          const float one = weights[row][head + 2 * t], other = weights[row][head + 2 * t + 1];
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
        const int slot = key + g + 8 * t;
        if (t < 2 && slot >= among.x && slot < among.y) {
          const float score = counted_score(t == 0 ? low : high);
          const int64_t place = static_cast<int64_t>(first + start + row) * views + view;
          workspace_scores[place * capacity + slot] = score;
          atomicAdd(&counts[row * kDigits + first_digit(score)], 1);
        }
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < here * kDigits; i += THREADS) {
      const int64_t place = static_cast<int64_t>(first + start + i / kDigits) * views + view;
      if (counts[i] > 0) atomicAdd(&workspace_counts[place * kDigits + i % kDigits], counts[i]);
    }
  }
}
