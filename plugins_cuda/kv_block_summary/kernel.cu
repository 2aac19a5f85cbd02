// KvBlockSummary: the channel-wise maximum and minimum of the keys of every new block.
//
//   summary_pool   bf16 [pages, KV_HEADS, 2, WIDTH], in and out
//   k_pool         bf16 [pages, KV_HEADS, PAGE_SIZE, WIDTH]
//   logical_pages  i32  [batch, table]
//   first_block    i32  [batch]
//   blocks         i32  [batch]
//
// One warp per block and KV head; a lane has two channels at a time. Most steps complete no block,
// so the grid has a fixed size, and warps loop over the blocks. A block of 16 keys of 64 channels
// has 2 KB. The first step after a prompt reads all of its keys, as attention does.
#include "../_device/bf16.cuh"
#include "../_device/ptx.cuh"

CONFIG

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    summarise_blocks(uint32_t* summary_pool, const uint32_t* k_pool, const int* logical_pages,
                     const int* first_block, const int* blocks, int batch, int table,
                     int sink_pages, int block_pages) {
  constexpr int kPairs = Config::kWidth / 2, kOfALane = ceil_div(kPairs, 32),
                kWarps = Config::kThreads / 32;
  pdl_launch_dependents();
  pdl_wait();
  const int lane = threadIdx.x % 32;
  for (int b = 0; b < batch; ++b) {
    const int first = first_block[b], items = (blocks[b] - first) * Config::kKvHeads;
    const int* pages = logical_pages + static_cast<int64_t>(b) * table + sink_pages;
    for (int item = blockIdx.x * kWarps + threadIdx.x / 32; item < items;
         item += gridDim.x * kWarps) {
      const int block = first + item / Config::kKvHeads, head = item % Config::kKvHeads;
      float2 maxima[kOfALane], minima[kOfALane];
      for (int page = 0; page < block_pages; ++page) {
        const int64_t place = pages[block * block_pages + page];
        const uint32_t* keys =
            k_pool + (place * Config::kKvHeads + head) * Config::kPageSize * kPairs;
#pragma unroll 4
        for (int key = 0; key < Config::kPageSize; ++key) {
#pragma unroll
          for (int i = 0; i < kOfALane; ++i) {
            const int pair = 32 * i + lane;
            const float2 k =
                pair < kPairs ? unpack_bf16x2(keys[key * kPairs + pair]) : make_float2(0.0f, 0.0f);
            const bool begins = page == 0 && key == 0;
            maxima[i].x = begins || k.x > maxima[i].x ? k.x : maxima[i].x;
            maxima[i].y = begins || k.y > maxima[i].y ? k.y : maxima[i].y;
            minima[i].x = begins || k.x < minima[i].x ? k.x : minima[i].x;
            minima[i].y = begins || k.y < minima[i].y ? k.y : minima[i].y;
          }
        }
      }
      const int64_t entry = pages[block * block_pages];
      uint32_t* summary = summary_pool + (entry * Config::kKvHeads + head) * 2 * kPairs;
#pragma unroll
      for (int i = 0; i < kOfALane; ++i) {
        const int pair = 32 * i + lane;
        if (pair < kPairs) {
          summary[pair] = pack_bf16x2(maxima[i].x, maxima[i].y);
          summary[kPairs + pair] = pack_bf16x2(minima[i].x, minima[i].y);
        }
      }
    }
  }
}
