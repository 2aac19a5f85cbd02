// TopLogprobs: CTAs list the largest logits of parts of 8192 each; one CTA per row then lists the
// largest of these.
//
//   workspace_best  [R, parts, max_top] ranked keys: a part's largest logits, falling; the first is
//                   always written, the others on request
//   workspace_sums  [R, parts] fp32: Σ exp(logit − largest) of a part
//
// All ranked keys of a row are different, because they include the token. The next largest key is
// therefore the largest one below the last; no entry has to be removed from a list.
#include "../_device/block_max.cuh"
#include "../_device/infinity.cuh"
#include "../_device/l2_word.cuh"
#include "../_device/ordered_key.cuh"
#include "../_device/row_place.cuh"

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kTokens = 16;  // of a thread
constexpr int kPartLogits = kThreads * kTokens;
constexpr float kLog2E = 1.44269504f;
// The values of runtime/engine_dir/plan.py.
constexpr int kAdjusts = 1, kMaskedRow = 2, kForcedRows = 4;

// The requests of a row's sequence. ``logits`` has the raw logits of a row that does not change.
struct RowKind {
  bool changes;
  int num_top;  // number of top tokens

  // Padding requests nothing.
  __device__ RowKind(const int* of_changes, const int* forced, const int* top_count,
                     const RowPlace& place, int batch, int max_top)
      : changes(false), num_top(0) {
    if (place.sequence == batch) return;
    const int change = load_l2_int(of_changes + place.sequence);
    const int first_free = (change & kForcedRows) != 0 ? load_l2_int(forced + place.sequence) : 0;
    const bool is_masked = (change & kMaskedRow) != 0 && place.slot == first_free;
    changes = (change & kAdjusts) != 0 || is_masked || place.slot < first_free;
    num_top = min(load_l2_int(top_count + place.sequence), max_top);
  }
  __device__ bool is_plain() const {
    return !changes && num_top <= 0;
  }
};

// Return the sum of all threads' values, in a fixed order, to thread 0.
__device__ __forceinline__ float block_sum(float value) {
  __shared__ float of_warps[kWarps];
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0.0f;
  for (int warp = 0; warp < kWarps; ++warp) total += of_warps[warp];
  return total;
}

// Grid (parts, R).
extern "C" __global__ void __launch_bounds__(kThreads)
    list_parts(const float* logits,       // [R, V]
               const float* raw,          // [R, V]
               const int* changes,        // [B]
               const int* forced,         // [B]
               const int* top_count,      // [B]
               const int* row_start,      // or null
               uint64_t* workspace_best,  // out
               float* workspace_sums,     // out
               int vocab, int max_top, int nodes, int batch) {
  __shared__ uint64_t of_warps[kWarps];
  pdl_launch_dependents();
  pdl_wait();
  const int r = blockIdx.y, part = r * gridDim.x + blockIdx.x;
  const RowKind kind(changes, forced, top_count, RowPlace(row_start, r, nodes, batch), batch,
                     max_top);
  if (kind.is_plain()) return;
  const float* row = (kind.changes ? raw : logits) + static_cast<int64_t>(r) * vocab;
  float x[kTokens];
#pragma unroll
  for (int n = 0; n < kTokens; ++n) {
    const int token = blockIdx.x * kPartLogits + n * kThreads + threadIdx.x;
    x[n] = token < vocab ? load_l2_float(row + token) : minus_infinity();
  }
  // No token has the key 0.
  const auto largest_below = [&](uint64_t bound) {
    uint64_t best = 0;
#pragma unroll
    for (int n = 0; n < kTokens; ++n) {
      const int token = blockIdx.x * kPartLogits + n * kThreads + threadIdx.x;
      const uint64_t key = token < vocab ? ranked_key(ordered_key(x[n]), token) : 0;
      if (key < bound && key > best) best = key;
    }
    return block_max(best, of_warps);
  };
  const int num_top = max(1, kind.num_top);
  uint64_t* list = workspace_best + static_cast<int64_t>(part) * max(max_top, 1);
  const uint64_t first = largest_below(~uint64_t{0});
  if (threadIdx.x == 0) list[0] = first;
  uint64_t last = first;
  for (int n = 1; n < num_top; ++n) {
    last = largest_below(last);
    if (threadIdx.x == 0) list[n] = last;
  }
  const float shift = ranked_value(first);
  float sum = 0.0f;
  if (shift != minus_infinity()) {
#pragma unroll
    for (int n = 0; n < kTokens; ++n) sum += exp2_fast((x[n] - shift) * kLog2E);
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) workspace_sums[part] = sum;
}

// Grid (R).
extern "C" __global__ void __launch_bounds__(kThreads)
    join_parts(const float* logits,             // [R, V]
               const float* raw,                // [R, V]
               const int* choice,               // [R]
               const float* chosen_logprob,     // [R]
               const int* changes,              // [B]
               const int* forced,               // [B]
               const int* top_count,            // [B]
               const int* row_start,            // [B + 1] or null
               const uint64_t* workspace_best,  // in
               const float* workspace_sums,     // in
               float* logprob,                  // out [R]
               int* top_ids,                    // out [R, max_top]
               float* top_logprobs,             // out [R, max_top]
               int vocab, int parts, int max_top, int nodes, int batch) {
  __shared__ uint64_t of_warps[kWarps];
  pdl_launch_dependents();
  pdl_wait();
  const int r = blockIdx.x, stride = max(max_top, 1);
  const RowKind kind(changes, forced, top_count, RowPlace(row_start, r, nodes, batch), batch,
                     max_top);
  if (kind.is_plain()) {
    if (threadIdx.x == 0) logprob[r] = load_l2_float(chosen_logprob + r);
    for (int n = threadIdx.x; n < max_top; n += kThreads) {
      top_ids[r * max_top + n] = -1;
      top_logprobs[r * max_top + n] = minus_infinity();
    }
    return;
  }
  const int num_top = kind.num_top, listed = max(1, num_top);
  const uint64_t* lists = workspace_best + static_cast<int64_t>(r) * parts * stride;
  const auto largest_below = [&](uint64_t bound) {
    uint64_t best = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < parts * listed; i += kThreads) {
      const uint64_t key = load_l2_word(lists + i / listed * stride + i % listed);
      if (key < bound && key > best) best = key;
    }
    return block_max(best, of_warps);
  };
  uint64_t best = largest_below(~uint64_t{0});
  const float largest = ranked_value(best);
  float sum = 0.0f;
#pragma unroll 1
  for (int part = threadIdx.x; part < parts; part += kThreads) {
    const float maximum_of_part = ranked_value(load_l2_word(lists + part * stride));
    if (maximum_of_part == minus_infinity()) continue;
    sum += load_l2_float(workspace_sums + r * parts + part) *
           exp2_fast((maximum_of_part - largest) * kLog2E);
  }
  const float log_total = largest + logf(block_sum(sum));
  const float* row = (kind.changes ? raw : logits) + static_cast<int64_t>(r) * vocab;
  const float chosen = load_l2_float(row + min(max(load_l2_int(choice + r), 0), vocab - 1));
  const float own = kind.changes ? chosen - log_total : load_l2_float(chosen_logprob + r);
  if (threadIdx.x == 0) logprob[r] = own;
#pragma unroll 1
  for (int n = 0; n < max_top; ++n) {
    const bool is_there = n < num_top && best != 0;
    if (threadIdx.x == 0) {
      top_ids[r * max_top + n] = is_there ? static_cast<int>(ranked_index(best)) : -1;
      top_logprobs[r * max_top + n] =
          is_there ? ranked_value(best) - chosen + own : minus_infinity();
    }
    if (is_there) best = largest_below(best);
  }
}
