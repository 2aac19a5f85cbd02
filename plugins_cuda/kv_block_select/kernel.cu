// KvBlockSelect: which blocks of the context the queries of a verification tree want most.
//
//   q              bf16 [T, KV_HEADS·GROUP, WIDTH]
//   summary_pool   bf16 [pages, KV_HEADS, 2, WIDTH]: maximum and minimum of a block's keys
//   logical_pages  i32  [B, table]
//   row_start      i32  [B + 1]
//   row_slot       i32  [T]
//   tree_start, tree_count, blocks, budget  i32 [B]
//   partial_table  i32  [B, KV_HEADS, entries], in and out
//   workspace_scores  f32 [B, KV_HEADS, most_blocks]
//
// score_blocks: a thread holds a block's two vectors and meets every query in shared memory. At
// 131k (8190 blocks, 4 queries, 8 heads a group) a layer reads 17 MB and does 0.27 G products,
// about 15 µs. select_blocks: a CTA per KV head finds the score of the last block taken by its
// digits, and writes the table in order of position.
#include "../_device/bf16.cuh"
#include "../_device/ordered_key.cuh"
#include "../_device/ptx.cuh"

#ifdef QUERY_TILE
extern "C" __global__ void __launch_bounds__(THREADS)
    score_blocks(const uint16_t* q, const uint4* summary_pool, const int* logical_pages,
                 const int* row_start, const int* row_slot, const int* tree_start,
                 const int* tree_count, const int* blocks, const int* budget,
                 float* workspace_scores, int table, int sink_pages, int block_pages,
                 int most_blocks) {
  DYNAMIC_SHARED(float, queries);  // [GROUP, QUERY_TILE, WIDTH]
  // Two threads share a block of more channels than one has registers for.
  constexpr int kShare = WIDTH > 64 ? 2 : 1, kBlocks = THREADS / kShare;
  constexpr int kVectors = WIDTH / 8 / kShare, kHeads = KV_HEADS * GROUP;
  pdl_launch_dependents();
  pdl_wait();
  const int head = blockIdx.y, b = blockIdx.z, count = blocks[b];
  // All of them are taken, or none.
  if (count <= budget[b]) return;
  const int first = row_start[b], root = first + tree_start[b] - row_slot[first];
  const int asking = OVER_QUERIES == 2 ? 1 : tree_count[b];
  const int* pages = logical_pages + static_cast<int64_t>(b) * table + sink_pages;
  const int part = threadIdx.x % kShare;
  for (int tile = blockIdx.x * kBlocks; tile < count; tile += gridDim.x * kBlocks) {
    const int block = tile + threadIdx.x / kShare;
    const int64_t entry = block < count ? pages[block * block_pages] : 0;
    const uint4* own = summary_pool + ((entry * KV_HEADS + head) * 2 * kShare + part) * kVectors;
    uint4 most[kVectors], least[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) most[i] = own[i], least[i] = own[kShare * kVectors + i];
    float score[GROUP];
#pragma unroll
    for (int g = 0; g < GROUP; ++g) score[g] = 0.0f;
    for (int start = 0; start < asking; start += QUERY_TILE) {
      const int here = min(QUERY_TILE, asking - start);
      __syncthreads();
      for (int i = threadIdx.x; i < GROUP * here * WIDTH; i += THREADS) {
        const int g = i / (here * WIDTH), row = i / WIDTH % here, channel = i % WIDTH;
        const int64_t at = static_cast<int64_t>(root + start + row) * kHeads + head * GROUP + g;
        queries[(g * QUERY_TILE + row) * WIDTH + channel] = bf16_to_float(q[at * WIDTH + channel]);
      }
      __syncthreads();
#pragma unroll
      for (int g = 0; g < GROUP; ++g) {
        for (int row = 0; row < here; ++row) {
          const float4* query =
              reinterpret_cast<const float4*>(queries + (g * QUERY_TILE + row) * WIDTH) +
              2 * part * kVectors;
          float high = 0.0f, low = 0.0f;
#pragma unroll
          for (int i = 0; i < 2 * kVectors; ++i) {
            const float4 x = query[i];
            const uint32_t ups[2] = {i % 2 ? most[i / 2].z : most[i / 2].x,
                                     i % 2 ? most[i / 2].w : most[i / 2].y};
            const uint32_t downs[2] = {i % 2 ? least[i / 2].z : least[i / 2].x,
                                       i % 2 ? least[i / 2].w : least[i / 2].y};
            const float channel[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const uint32_t up = ups[j / 2], down = downs[j / 2];
              const float k = j % 2 ? bf16_high_to_float(up) : bf16_low_to_float(up);
              const float l = j % 2 ? bf16_high_to_float(down) : bf16_low_to_float(down);
              const bool by_maximum = !QUEST || channel[j] > 0.0f;
              high = by_maximum ? __fmaf_rn(channel[j], k, high) : high;
              low = !QUEST || !by_maximum ? __fmaf_rn(channel[j], l, low) : low;
            }
          }
          if (kShare == 2) {
            high += __shfl_xor_sync(kAllLanes, high, 1);
            low += __shfl_xor_sync(kAllLanes, low, 1);
          }
          const float one = QUEST ? high + low : (high > low ? high : low);
          const bool begins = start + row == 0;
          if (OVER_QUERIES == 1) {
            score[g] = begins || one > score[g] ? one : score[g];
          } else {
            score[g] = begins ? one : score[g] + one;
          }
        }
      }
    }
    if (block < count && part == 0) {
      float sum = 0.0f;
#pragma unroll
      for (int g = 0; g < GROUP; ++g) sum += score[g];
      workspace_scores[(static_cast<int64_t>(b) * KV_HEADS + head) * most_blocks + block] = sum;
    }
  }
}
#else

constexpr int kWarps = THREADS / 32, kDigits = 256;

// How many threads before this one have the flag; ``total`` is that of all.
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

// The digit of the last of the `left` greatest keys, and how many have a greater one; by one warp.
__device__ __forceinline__ void find_digit(const int (&digits)[kDigits], int left,
                                           int (&found)[2]) {
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
  found[0] = digit;
  found[1] = above;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    select_blocks(const int* logical_pages, const int* blocks, const int* budget,
                  int* partial_table, const float* workspace_scores, int table, int sink_pages,
                  int block_pages, int most_blocks, int entries) {
  DYNAMIC_SHARED(int, chosen);  // as many blocks as the table has room for
  __shared__ int digits[kDigits], counts[kWarps], found[2];
  pdl_launch_dependents();
  pdl_wait();
  const int head = blockIdx.x, heads = gridDim.x, b = blockIdx.y, count = blocks[b];
  if (count < 0) return;
  const int wanted = min(min(budget[b], count), ceil_div(entries, block_pages));
  const float* scores = workspace_scores + (static_cast<int64_t>(b) * heads + head) * most_blocks;
  const bool all = count <= budget[b];

  // The key of the last block taken, from its highest digit on, and how many of that key.
  uint32_t edge = 0;
  int left = wanted;
  for (int shift = 24; !all && shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < kDigits; i += THREADS) digits[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += THREADS) {
      const uint32_t key = ordered_key(scores[i]);
      if (shift == 24 || key >> (shift + 8) == edge >> (shift + 8)) {
        atomicAdd(&digits[key >> shift & 255], 1);
      }
    }
    __syncthreads();
    if (threadIdx.x < 32) find_digit(digits, left, found);
    __syncthreads();
    edge |= static_cast<uint32_t>(found[0]) << shift;
    left -= found[1];
  }

  int taken = 0, ties = 0;
  for (int start = 0; start < count && taken < wanted; start += THREADS) {
    const int block = start + threadIdx.x;
    const uint32_t key = block < count && !all ? ordered_key(scores[block]) : 0;
    const bool tied = block < count && !all && key == edge;
    int of_round;
    const int rank = ties + rank_of(tied, counts, of_round);
    ties += of_round;
    const bool take = block < count && (all || key > edge || (tied && rank < left));
    const int place = taken + rank_of(take, counts, of_round);
    taken += of_round;
    if (take && place < wanted) chosen[place] = block;
  }
  __syncthreads();

  const int* pages = logical_pages + static_cast<int64_t>(b) * table;
  int* view = partial_table + (static_cast<int64_t>(b) * heads + head) * entries;
  for (int i = threadIdx.x; i < entries; i += THREADS) {
    const int behind = i - sink_pages, retrieved = wanted * block_pages;
    int logical = i;
    if (behind >= retrieved) {
      logical = i - retrieved + count * block_pages;
    } else if (behind >= 0) {
      logical = sink_pages + chosen[behind / block_pages] * block_pages + behind % block_pages;
    }
    view[i] = logical < table ? pages[logical] : 0;
  }
}
#endif
