// KvBlockSelect, first launch: the scores of blocks for the queries of a verification tree.
//
// The arguments are those of kernel.cu.
#include "../_device/bf16.cuh"
#include "../_device/ptx.cuh"

CONFIG

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    score_blocks(const uint16_t* q, const uint4* summary_pool, const int* logical_pages,
                 const int* row_start, const int* row_slot, const int* tree_start,
                 const int* tree_count, const int* blocks, const int* budget,
                 float* workspace_scores, int table, int sink_pages, int block_pages,
                 int max_blocks) {
  DYNAMIC_SHARED(float, queries);  // [GROUP, QUERY_TILE, WIDTH]
  static_assert(4 * Config::kGroup * Config::kQueryTile * Config::kWidth == Config::kSharedBytes,
                "as the launch says");
  // Two threads share a block if it has more channels than one has registers for.
  constexpr int kShare = Config::kWidth > 64 ? 2 : 1, kBlocks = Config::kThreads / kShare;
  constexpr int kVectors = Config::kWidth / 8 / kShare, kHeads = Config::kKvHeads * Config::kGroup;
  pdl_launch_dependents();
  pdl_wait();
  const int head = blockIdx.y, b = blockIdx.z, count = blocks[b];
  // All blocks are selected, so no scores are required.
  if (count <= budget[b]) return;
  const int first = row_start[b], root = first + tree_start[b] - row_slot[first];
  const int asking = Config::kOverQueries == 2 ? 1 : tree_count[b];
  const int* pages = logical_pages + static_cast<int64_t>(b) * table + sink_pages;
  const int part = threadIdx.x % kShare;
  for (int tile = blockIdx.x * kBlocks; tile < count; tile += gridDim.x * kBlocks) {
    const int block = tile + threadIdx.x / kShare;
    const int64_t entry = block < count ? pages[block * block_pages] : 0;
    const uint4* own =
        summary_pool + ((entry * Config::kKvHeads + head) * 2 * kShare + part) * kVectors;
    uint4 maxima[kVectors], minima[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) maxima[i] = own[i], minima[i] = own[kShare * kVectors + i];
    float score[Config::kGroup];
#pragma unroll
    for (int g = 0; g < Config::kGroup; ++g) score[g] = 0.0f;
    for (int start = 0; start < asking; start += Config::kQueryTile) {
      const int here = min(Config::kQueryTile, asking - start);
      __syncthreads();
      for (int i = threadIdx.x; i < Config::kGroup * here * Config::kWidth; i += Config::kThreads) {
        const int g = i / (here * Config::kWidth), row = i / Config::kWidth % here,
                  channel = i % Config::kWidth;
        const int64_t at =
            static_cast<int64_t>(root + start + row) * kHeads + head * Config::kGroup + g;
        queries[(g * Config::kQueryTile + row) * Config::kWidth + channel] =
            bf16_to_float(q[at * Config::kWidth + channel]);
      }
      __syncthreads();
#pragma unroll
      for (int g = 0; g < Config::kGroup; ++g) {
        for (int row = 0; row < here; ++row) {
          const float4* query = reinterpret_cast<const float4*>(
                                    queries + (g * Config::kQueryTile + row) * Config::kWidth) +
                                2 * part * kVectors;
          float high = 0.0f, low = 0.0f;
#pragma unroll
          for (int i = 0; i < 2 * kVectors; ++i) {
            const float4 x = query[i];
            const uint32_t ups[2] = {i % 2 ? maxima[i / 2].z : maxima[i / 2].x,
                                     i % 2 ? maxima[i / 2].w : maxima[i / 2].y};
            const uint32_t downs[2] = {i % 2 ? minima[i / 2].z : minima[i / 2].x,
                                       i % 2 ? minima[i / 2].w : minima[i / 2].y};
            const float channel[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const uint32_t up = ups[j / 2], down = downs[j / 2];
              const float k = j % 2 ? bf16_high_to_float(up) : bf16_low_to_float(up);
              const float l = j % 2 ? bf16_high_to_float(down) : bf16_low_to_float(down);
              const bool by_maximum = !Config::kQuest || channel[j] > 0.0f;
              high = by_maximum ? __fmaf_rn(channel[j], k, high) : high;
              low = !Config::kQuest || !by_maximum ? __fmaf_rn(channel[j], l, low) : low;
            }
          }
          if (kShare == 2) {
            high += __shfl_xor_sync(kAllLanes, high, 1);
            low += __shfl_xor_sync(kAllLanes, low, 1);
          }
          const float one = Config::kQuest ? high + low : (high > low ? high : low);
          const bool begins = start + row == 0;
          if (Config::kOverQueries == 1) {
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
      for (int g = 0; g < Config::kGroup; ++g) sum += score[g];
      workspace_scores[(static_cast<int64_t>(b) * Config::kKvHeads + head) * max_blocks + block] =
          sum;
    }
  }
}
