// KvBlockSelect: the blocks of the context with the best scores for a verification tree's queries.
//
//   q              bf16 [T, KV_HEADS·GROUP, WIDTH]
//   summary_pool   bf16 [pages, KV_HEADS, 2, WIDTH]: maximum and minimum of a block's keys
//   logical_pages  i32  [B, table]
//   row_start      i32  [B + 1]
//   row_slot       i32  [T]
//   tree_start, tree_count, blocks, budget  i32 [B]
//   partial_table  i32  [B, KV_HEADS, entries], in and out
//   workspace_scores  f32 [B, KV_HEADS, max_blocks]
//
// score_blocks (score.cu): a thread holds the two vectors of a block, and reads every query from
// shared memory. At 131k tokens (8190 blocks, 4 queries, 8 heads per group) a layer reads 17 MB and
// computes 0.27 G products, about 15 µs. select_blocks: a CTA per KV head determines the score of
// the last selected block, digit by digit, and writes the table in order of position.
#include "../_device/ordered_key.cuh"
#include "../_device/ptx.cuh"

CONFIG

constexpr int kWarps = Config::kThreads / 32, kDigits = 256;

// Return the number of earlier threads with the flag; ``total`` receives that of all threads.
__device__ __forceinline__ int rank_of(bool flag, int (&counts)[kWarps], int& total) {
  const unsigned bits = __ballot_sync(kAllLanes, flag);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
  if (lane == 0) counts[warp] = __popc(bits);
  __syncthreads();
  int before = __popc(bits & ((1u << lane) - 1));
  total = 0;
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) before += counts[i];
    total += counts[i];
  }
  return before;
}

// One warp computes the digit of the last of the `left` greatest keys, and the number of keys with
// a greater digit.
__device__ __forceinline__ void find_digit(const int (&digits)[kDigits], int left,
                                           int (&result)[2]) {
  constexpr int kOwn = kDigits / 32;
  const int lane = threadIdx.x, top = kDigits - 1 - lane * kOwn;
  int own = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) own += digits[top - i];
  int upto = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(kAllLanes, upto, distance);
    if (lane >= distance) upto += other;
  }
  int above = upto - own, digit = top;
  const bool mine = left > 0 ? above < left && upto >= left : lane == 0;
  if (!mine) return;
  while (above + digits[digit] < left) above += digits[digit--];
  result[0] = digit;
  result[1] = above;
}

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    select_blocks(const int* logical_pages, const int* blocks, const int* budget,
                  int* partial_table, const float* workspace_scores, int table, int sink_pages,
                  int block_pages, int max_blocks, int entries) {
  DYNAMIC_SHARED(int, chosen);  // as many blocks as fit in the table
  __shared__ int digits[kDigits], counts[kWarps], result[2];
  pdl_launch_dependents();
  pdl_wait();
  const int head = blockIdx.x, heads = gridDim.x, b = blockIdx.y, count = blocks[b];
  if (count < 0) return;
  const int num_selected = min(min(budget[b], count), ceil_div(entries, block_pages));
  const float* scores = workspace_scores + (static_cast<int64_t>(b) * heads + head) * max_blocks;
  const bool all = count <= budget[b];

  // The key of the last selected block, from its highest digit on; `left` blocks have this prefix.
  uint32_t edge = 0;
  int left = num_selected;
  for (int shift = 24; !all && shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < kDigits; i += Config::kThreads) digits[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += Config::kThreads) {
      const uint32_t key = ordered_key(scores[i]);
      if (shift == 24 || key >> (shift + 8) == edge >> (shift + 8)) {
        atomicAdd(&digits[key >> shift & 255], 1);
      }
    }
    __syncthreads();
    if (threadIdx.x < 32) find_digit(digits, left, result);
    __syncthreads();
    edge |= static_cast<uint32_t>(result[0]) << shift;
    left -= result[1];
  }

  int num_taken = 0, ties = 0;
  for (int start = 0; start < count && num_taken < num_selected; start += Config::kThreads) {
    const int block = start + threadIdx.x;
    const uint32_t key = block < count && !all ? ordered_key(scores[block]) : 0;
    const bool tied = block < count && !all && key == edge;
    int of_round;
    const int rank = ties + rank_of(tied, counts, of_round);
    ties += of_round;
    const bool take = block < count && (all || key > edge || (tied && rank < left));
    const int place = num_taken + rank_of(take, counts, of_round);
    num_taken += of_round;
    if (take && place < num_selected) chosen[place] = block;
  }
  __syncthreads();

  const int* pages = logical_pages + static_cast<int64_t>(b) * table;
  int* view = partial_table + (static_cast<int64_t>(b) * heads + head) * entries;
  for (int i = threadIdx.x; i < entries; i += Config::kThreads) {
    const int offset = i - sink_pages, retrieved = num_selected * block_pages;
    int logical = i;
    if (offset >= retrieved) {
      logical = i - retrieved + count * block_pages;
    } else if (offset >= 0) {
      logical = sink_pages + chosen[offset / block_pages] * block_pages + offset % block_pages;
    }
    view[i] = logical < table ? pages[logical] : 0;
  }
}
