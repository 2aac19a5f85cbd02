// RmsMoe over a prompt chunk: y = x + experts(norm(x)), or without x; rows sorted by expert for
// grouped GEMMs.
//
//   x              bf16 [rows, H]                 in    from row_start[SEQUENCES] on padding
//   norm           bf16 [H]                       in
//   router_weight  bf16 [EXPERTS + SHARED_GATES, H]  in
//   router_bias    bf16 [EXPERTS + SHARED_GATES]  in
//   gate_up        u8 [EXPERTS, I/8, tile bytes]  in    packed (packing.py): MXFP4, or with BF16
//                                                       bf16 [EXPERTS, I/8, 16·H]
//   gate_up_bias   bf16 [EXPERTS, 2·I]            in    packed: 8 gates, then their 8 ups
//   down           u8 [EXPERTS, H/8, tile bytes]  in    packed: MXFP4, or with BF16 bf16, 512
//                                                       values for every two blocks of I
//   down_bias      bf16 [EXPERTS, H]              in
//   row_start      int32 [SEQUENCES + 1]          in
//   y              bf16 [rows, H]                 out   live rows
//   workspace_logits    fp32                      of the first launch, as in route.cu
//   workspace_chosen    int32 [rows, TOP_K]       a row's experts, ascending
//   workspace_shares    fp32 [rows, TOP_K]        their weights
//   workspace_position  int32 [rows, TOP_K]       their places among the sorted rows
//   workspace_tiles     int32                     prefill_tiles.cuh
//   workspace_rows      panels of sorted rows, H rounded up to 64; later bf16 [sorted rows, H]
//   workspace_h         panels of sorted rows, I rounded up to 64
//
// Launches: route; sort; gather (the norm again, each row to its TOP_K places); gate/up and down
// (prefill_gate_up.cu, prefill_down.cu); combine. For 2048 rows of GPT-OSS-20B (prefill_experts.cuh
// has the GEMMs' 450 and 225 µs): route 6 µs; sort 4 µs; gather 12 MB in, 47 MB out, 20 µs; combine
// 59 MB in, 12 MB out, 20 µs.
#include "device/config.cuh"
#include "device/prefill_router.cuh"
#include "device/prefill_sort.cuh"

__device__ __forceinline__ int live_rows(const int* row_start) {
  return load_l2_int(row_start + Config::kSequences);
}

// Compute the experts and weights of a CTA's rows. prefill_with_parts.cu has routers with
// additional inputs.
extern "C" __global__ void __launch_bounds__(kRowsThreads)
    moe_route(const uint16_t* x, const uint16_t* norm, const uint16_t* router_weight,
              const uint16_t* router_bias, const int* row_start, float* workspace_logits,
              int* workspace_chosen, float* workspace_shares) {
  DYNAMIC_SHARED(unsigned char, shared);
  route(shared, x, norm, router_weight, router_bias, row_start, {}, workspace_logits,
        workspace_chosen, workspace_shares);
}

extern "C" __global__ void __launch_bounds__(kSortThreads)
    moe_sort(const int* row_start, const int* workspace_chosen, int* workspace_position,
             int* workspace_tiles) {
  __shared__ SharedSort shared;
  pdl_launch_dependents();
  pdl_wait();
  sort_entries(workspace_chosen, live_rows(row_start) * Config::kTopK, workspace_position,
               workspace_tiles, shared);
}

// Normalize rows, a warp per row, and write each to its places in the panels.
extern "C" __global__ void __launch_bounds__(kRowsThreads)
    moe_gather(const uint16_t* x, const uint16_t* norm, const int* row_start,
               const int* workspace_position, unsigned char* workspace_rows, int panel_rows) {
  pdl_launch_dependents();
  pdl_wait();
  const int row = static_cast<int>(blockIdx.x) * kRouterWarps + threadIdx.x / 32;
  if (row >= live_rows(row_start)) return;
  const uint16_t* const values = x + static_cast<size_t>(row) * kHidden;
  const float scale = inverse_rms<Config::kKBlocks>(values, static_cast<float>(Config::kEps));
  int places[Config::kTopK];
#pragma unroll
  for (int k = 0; k < Config::kTopK; ++k)
    places[k] = load_l2_int(workspace_position + row * Config::kTopK + k);
  for (int c = threadIdx.x % 32; c < 8 * ceil_div(Config::kKBlocks, 2); c += 32) {
    const uint4 chunk = row_chunk<Config::kKBlocks, kNorm>(values, norm, scale, c / 8, c % 8);
#pragma unroll
    for (int k = 0; k < Config::kTopK; ++k)
      *reinterpret_cast<uint4*>(workspace_rows + panel_chunk(c / 8, c % 8, places[k], panel_rows)) =
          chunk;
  }
}

// Eight columns a thread: x (with RESIDUAL) plus the rounded sum of a row's experts by ascending
// id.
extern "C" __global__ void __launch_bounds__(kRowsThreads)
    moe_combine(const uint16_t* x, const int* row_start, uint16_t* y, const float* workspace_shares,
                const int* workspace_position, const uint16_t* workspace_rows) {
  pdl_launch_dependents();
  pdl_wait();
  const int unit = static_cast<int>(blockIdx.x) * kRowsThreads + threadIdx.x;
  const int row = unit / (kHidden / 8), column = unit % (kHidden / 8) * 8;
  if (row >= live_rows(row_start)) return;
  // Two rounds of loads: places, then rows.
  int place[Config::kTopK];
  float share[Config::kTopK];
  uint4 expert[Config::kTopK];
#pragma unroll
  for (int k = 0; k < Config::kTopK; ++k)
    place[k] = load_l2_int(workspace_position + row * Config::kTopK + k);
#pragma unroll
  for (int k = 0; k < Config::kTopK; ++k)
    share[k] = load_l2_float(workspace_shares + row * Config::kTopK + k);
  const size_t at = static_cast<size_t>(row) * kHidden + column;
  const uint4 v = load_l2_16(x + at);
#pragma unroll
  for (int k = 0; k < Config::kTopK; ++k) {
    expert[k] = load_l2_16(workspace_rows + static_cast<size_t>(place[k]) * kHidden + column);
  }
  float sums[8] = {};
#pragma unroll
  for (int k = 0; k < Config::kTopK; ++k) {
    const uint32_t words[4] = {expert[k].x, expert[k].y, expert[k].z, expert[k].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack_bf16x2(words[i]);
      sums[2 * i] = fmaf(share[k], pair.x, sums[2 * i]);
      sums[2 * i + 1] = fmaf(share[k], pair.y, sums[2 * i + 1]);
    }
  }
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
  uint32_t out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 own = unpack_bf16x2(words[i]);
    const float2 experts = unpack_bf16x2(pack_bf16x2(sums[2 * i], sums[2 * i + 1]));
    out[i] = Config::kResidual ? pack_bf16x2(own.x + experts.x, own.y + experts.y)
                               : pack_bf16x2(experts.x, experts.y);
  }
  *reinterpret_cast<uint4*>(y + at) = make_uint4(out[0], out[1], out[2], out[3]);
}
