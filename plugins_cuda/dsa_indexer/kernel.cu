// DsaIndexer: scores of all cached keys, then the slots that each row attends to.
//
//   q              bf16 [T, HEADS, WIDTH]
//   head_weights   bf16 [T, HEADS], or null: every head counts once
//   key_pool       bf16 [pages, 1, PAGE_SIZE, WIDTH]
//   page_table     i32  [B, views, table]
//   row_start      i32  [B + 1]
//   row_slot, positions  i32 [T]
//   tree_start, budget   i32 [B]
//   ancestor_bits  i32  [T, WORDS]
//   selected       i32  [T, views, held], out
//   workspace_scores  f32 [T, views, capacity]: of committed slots; others are not written
//
// score_slots: a warp holds 16 keys in registers as A of mma, and meets the heads of one row after
// another, eight to a tile, from shared memory: keys are read once for as many rows as it holds. A
// row's sums do not depend on the others. At 131k a layer with keys of 256 reads 67 MB, 16 µs at
// 4.2 TB/s; four rows of four heads are 2.1 G products, a few µs of the tensor cores.
//
// select_slots: a CTA per row and view. What a row must keep is known from where it stands; of the
// slots between the first tokens and the recent ones it takes the best, whose edge three radix
// passes over the scores find (1.5 MB of L2 a row at 131k). Bits of the slots taken, in shared
// memory, give the list in order.
#include "../_device/attention_rows.cuh"
#include "../_device/bf16.cuh"
#include "../_device/ordered_key.cuh"
#include "../_device/ptx.cuh"

constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr int kWarps = THREADS / 32;

#ifdef ROWS
constexpr int kBlocks = ceil_div(WIDTH, 32), kHeadTiles = ceil_div(HEADS, 8);
constexpr int kKeys = 16, kStride = 32 * kBlocks + 32;  // of a query: rows lie in other banks

extern "C" __global__ void __launch_bounds__(THREADS)
    score_slots(const uint16_t* q, const uint16_t* head_weights, const uint16_t* key_pool,
                const int* page_table, const int* row_start, const int* tree_start,
                const int* positions, const int* budget, float* workspace_scores, int table,
                int threshold) {
  DYNAMIC_SHARED(uint16_t, queries);  // [ROWS, 8·kHeadTiles, kStride]
  __shared__ float weights[ROWS][8 * kHeadTiles];
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
    const int stride = gridDim.x * kWarps * kKeys;
    for (int key = (blockIdx.x * kWarps + threadIdx.x / 32) * kKeys; key < end; key += stride) {
      uint4 keys[2][kBlocks];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int slot = key + g + 8 * half;
        const int64_t page = slot < end ? pages[slot / PAGE_SIZE] : 0;
        const uint16_t* own = key_pool + (page * PAGE_SIZE + slot % PAGE_SIZE) * WIDTH;
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          const int channel = 32 * block + 8 * t;
          const bool held = slot < end && channel < WIDTH;
          keys[half][block] =
              held ? *reinterpret_cast<const uint4*>(own + channel) : make_uint4(0, 0, 0, 0);
        }
      }
      for (int row = 0; row < here; ++row) {
        if (positions[first + start + row] < threshold) continue;
        float low = 0.0f, high = 0.0f;
#pragma unroll
        for (int tile = 0; tile < kHeadTiles; ++tile) {
          const int head = 8 * tile;
          const uint16_t* own = queries + (row * 8 * kHeadTiles + head + g) * kStride + 8 * t;
          float products[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
          for (int block = 0; block < kBlocks; ++block) {
            // Lane t has the same eight channels of keys and queries: any order of them will do.
            const uint4 x = keys[0][block], y = keys[1][block];
            const uint4 w = *reinterpret_cast<const uint4*>(own + 32 * block);
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
        float* scores = workspace_scores +
                        (static_cast<int64_t>(first + start + row) * views + view) * capacity;
        if (t == 0 && key + g < end) scores[key + g] = low;
        if (t == 1 && key + g + 8 < end) scores[key + g + 8] = high;
      }
    }
  }
}
#else

constexpr int kDigits = 2048, kDigitsOfALane = kDigits / 32;

// The sum of `value` over the threads in front of this one; `total` is that of all.
__device__ __forceinline__ int sum_before(int value, int (&sums)[kWarps], int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int upto = value;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(kAllLanes, upto, distance);
    if (lane >= distance) upto += other;
  }
  __syncthreads();
  if (lane == 31) sums[warp] = upto;
  __syncthreads();
  int before = upto - value;
  total = 0;
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) before += sums[i];
    total += sums[i];
  }
  return before;
}

// Adds one to the count of each lane's digit (negative: none). Scores of 0 are many: lanes that
// have the digit of the first one add up first.
__device__ __forceinline__ void count_digit(int digit, int* counts) {
  const unsigned counted = __ballot_sync(kAllLanes, digit >= 0);
  if (counted == 0) return;
  const int leader = __ffs(static_cast<int>(counted)) - 1, lane = threadIdx.x % 32;
  const int common = __shfl_sync(kAllLanes, digit, leader);
  const unsigned same = __ballot_sync(kAllLanes, digit == common);
  if (lane == leader) {
    atomicAdd(&counts[common], __popc(same));
  } else if (digit >= 0 && digit != common) {
    atomicAdd(&counts[digit], 1);
  }
}

// By the first warp: the highest digit at which as many as `left` are reached, and how many are
// above it.
__device__ __forceinline__ void find_digit(const int* counts, int left, int (&found)[2]) {
  const int lane = threadIdx.x % 32, top = kDigits - 1 - lane * kDigitsOfALane;
  int own = 0;
  for (int i = 0; i < kDigitsOfALane; ++i) own += counts[top - i];
  int upto = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(kAllLanes, upto, distance);
    if (lane >= distance) upto += other;
  }
  int above = upto - own;
  if (above < left && upto >= left) {
    int digit = top;
    while (above + counts[digit] < left) above += counts[digit--];
    found[0] = digit;
    found[1] = above;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    select_slots(const int* row_start, const int* row_slot, const int* tree_start,
                 const int* ancestor_bits, const int* positions, const int* budget, int* selected,
                 const float* workspace_scores, int batch, int capacity, int held, int threshold,
                 int first_tokens, int recent_tokens) {
  DYNAMIC_SHARED(uint32_t, taken);  // [words], and as many of slots that tie at the edge
  __shared__ int counts[kDigits], sums[kWarps], found[2];
  pdl_launch_dependents();
  pdl_wait();
  const int row = blockIdx.x, view = blockIdx.y, views = gridDim.y, lane = threadIdx.x % 32;
  const int64_t place = static_cast<int64_t>(row) * views + view;
  int* list = selected + place * held;
  int b = 0;
  while (b < batch && row >= row_start[b + 1]) ++b;
  const bool whole = b < batch && (budget[b] < 0 || positions[row] < threshold);
  if (b == batch || whole) {
    for (int i = threadIdx.x; i < held; i += THREADS) list[i] = whole && i == 0 ? -2 : -1;
    return;
  }
  const int start = tree_start[b], own = row_slot[row];
  const int* ancestors = ancestor_bits + static_cast<int64_t>(row) * WORDS;
  const int nodes = bits_below<WORDS>(ancestors, 32 * WORDS);
  const int chain = min(own + 1, start), position = own < start ? own : start + nodes - 1;
  const int late = min(max(position - recent_tokens + 1, 0), chain);
  const int low = min(first_tokens, late), others = late - low;
  const int wanted = min(budget[b], others);
  const float* scores = workspace_scores + place * capacity;

  // The key of the last slot taken, from its highest digit on, and how many of that key.
  const bool all = wanted == others;
  uint32_t edge = 0;
  int left = wanted;
  for (int shift = 21; !all && wanted > 0 && shift >= 0; shift = shift == 21 ? 10 : shift - 10) {
    const int bits = shift > 0 ? 11 : 10;
    for (int i = threadIdx.x; i < kDigits; i += THREADS) counts[i] = 0;
    __syncthreads();
    for (int slot = low + threadIdx.x - lane; slot < late; slot += THREADS) {
      int digit = -1;
      if (slot + lane < late) {
        const uint32_t key = ordered_key(scores[slot + lane]);
        const bool near = shift == 21 || key >> (shift + bits) == edge >> (shift + bits);
        digit = near ? static_cast<int>(key >> shift & ((1u << bits) - 1)) : -1;
      }
      count_digit(digit, counts);
    }
    __syncthreads();
    if (threadIdx.x < 32) find_digit(counts, left, found);
    __syncthreads();
    edge |= static_cast<uint32_t>(found[0]) << shift;
    left -= found[1];
    __syncthreads();
  }

  const int words = ceil_div(chain, 32);
  uint32_t* tied = taken + ceil_div(capacity, 32);
  for (int word = threadIdx.x / 32; word < words; word += kWarps) {
    const int slot = 32 * word + lane;
    const bool kept = slot < chain && (slot < low || slot >= late);
    const bool other = slot >= low && slot < late && wanted > 0;
    const uint32_t key = other && !all ? ordered_key(scores[slot]) : 0;
    const uint32_t take = __ballot_sync(kAllLanes, kept || (other && (all || key > edge)));
    const uint32_t ties = __ballot_sync(kAllLanes, other && !all && key == edge);
    if (lane == 0) taken[word] = take, tied[word] = ties;
  }
  __syncthreads();

  // Each thread has some words of its own.
  const int of_a_thread = ceil_div(words, THREADS);
  const int begin = min(static_cast<int>(threadIdx.x) * of_a_thread, words);
  const int stop = min(begin + of_a_thread, words);
  int count = 0, total;
  for (int word = begin; word < stop; ++word) count += __popc(tied[word]);
  int rank = sum_before(count, sums, total);
  count = 0;
  for (int word = begin; word < stop; ++word) {
    uint32_t bits = tied[word], chosen = taken[word];
    for (; bits != 0 && rank < left; ++rank, bits &= bits - 1) chosen |= bits & -bits;
    taken[word] = chosen;
    count += __popc(chosen);
  }
  int at = sum_before(count, sums, total);
  for (int word = begin; word < stop; ++word) {
    for (uint32_t bits = taken[word]; bits != 0; bits &= bits - 1) {
      list[at++] = 32 * word + __ffs(static_cast<int>(bits)) - 1;
    }
  }
  for (int i = total + threadIdx.x; i < held; i += THREADS) {
    list[i] = i < total + nodes ? start + set_bit<WORDS>(ancestors, i - total) : -1;
  }
}
#endif
