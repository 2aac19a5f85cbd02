// AdjustLogits: a thread applies all steps to its tokens of a row, so that no thread reads what
// another one writes. CTAs of unchanged rows return at once.
//
// It moves 20 bytes per token: 4 MB per row of 201088 logits.
#include "../_device/ptx.cuh"
#include "../_device/row_place.cuh"

// The values of runtime/engine_dir/plan.py.
constexpr int kAdjusts = 1, kMaskedRow = 2, kForcedRows = 4;
constexpr int kEndsOutput = 1 << 29, kInPrompt = 1 << 30;
// No temperature turns these into infinities (runtime/sampling.py, runtime/guides/grammar.py).
constexpr float kMasked = -1e30f, kRefused = -3e30f;

constexpr int kBlock = 256, kTokens = 4;

struct Penalties {
  float repetition, frequency, presence;

  __device__ __forceinline__ float operator()(float x, int marks) const {
    const int count = marks & (kEndsOutput - 1);
    if ((marks & kInPrompt) != 0 || count > 0) {
      x = x > 0.0f ? __fdiv_rn(x, repetition) : __fmul_rn(x, repetition);
    }
    if (count > 0) {
      x = __fadd_rn(x, -__fmul_rn(frequency, static_cast<float>(count)));
      x = __fadd_rn(x, -presence);
    }
    return x;
  }
};

extern "C" __global__ void __launch_bounds__(kBlock)
    adjust_logits(float* logits,             // in and out [R, V], R = B · nodes without row_start
                  const int* row_tokens,     // [R] or null
                  const int* ancestor_bits,  // [R, bit_words] or null
                  const int* positions,      // [R]
                  const int* changes,        // [B]
                  const int* forced,         // [B]
                  const int* min_position,   // [B]
                  const float* repetition,   // [B]
                  const float* frequency,    // [B]
                  const float* presence,     // [B]
                  const float* bias,         // [B, V]
                  const int* mask,           // [B, words]
                  const int* marks,          // [B, V]
                  const int* row_start,      // [B + 1] or null
                  float* raw,                // out [R, V]: the rows that change
                  int vocab, int words, int nodes, int batch, int bit_words) {
  DYNAMIC_SHARED(int, path);  // [nodes]: the token of each slot on the row's path, else -1
  pdl_launch_dependents();
  pdl_wait();
  const int r = blockIdx.y;
  const RowPlace place(row_start, r, nodes, batch);
  const int b = place.sequence, slot = place.slot;
  if (b == batch) return;
  const int change = load_l2_int(changes + b);
  const bool adjusts = (change & kAdjusts) != 0;
  // The mask of a guide is for the root, or for the row after the forced ones.
  const int first_free = (change & kForcedRows) != 0 ? load_l2_int(forced + b) : 0;
  const bool is_masked = (change & kMaskedRow) != 0 && slot == first_free;
  const bool is_forced = slot < first_free && row_tokens != nullptr;
  if (!adjusts && !is_masked && !is_forced) return;
  // The next slot is the next row, because a forced row is never the last of its sequence.
  const int only = is_forced ? load_l2_int(row_tokens + r + 1) : 0;
  const bool counts = adjusts && row_tokens != nullptr && ancestor_bits != nullptr;
  for (int j = threadIdx.x; counts && j < place.rows; j += kBlock) {
    const int word = load_l2_int(ancestor_bits + static_cast<int64_t>(r) * bit_words + j / 32);
    const bool is_on_path = (static_cast<uint32_t>(word) >> j % 32 & 1u) != 0;
    path[j] = is_on_path ? load_l2_int(row_tokens + place.first + j) : -1;
  }
  __syncthreads();
  const int64_t row = static_cast<int64_t>(r) * vocab, state = static_cast<int64_t>(b) * vocab;
  const bool is_early = load_l2_int(positions + r) < load_l2_int(min_position + b);
  const Penalties penalise{load_l2_float(repetition + b), load_l2_float(frequency + b),
                           load_l2_float(presence + b)};
#pragma unroll
  for (int n = 0; n < kTokens; ++n) {
    const int token = (blockIdx.x * kTokens + n) * kBlock + threadIdx.x;
    if (token >= vocab) return;
    float x = load_l2_float(logits + row + token);
    raw[row + token] = x;
    if (adjusts) {
      int marked = load_l2_int(marks + state + token);
#pragma unroll 1
      for (int j = 0; counts && j < place.rows; ++j) marked += path[j] == token;
      x = __fadd_rn(x, load_l2_float(bias + state + token));
      if (is_early && (marked & kEndsOutput) != 0) x = kMasked;
      x = penalise(x, marked);
    }
    if (is_masked) {
      const int word = load_l2_int(mask + static_cast<int64_t>(b) * words + token / 32);
      if ((static_cast<uint32_t>(word) >> token % 32 & 1u) == 0) x = kRefused;
    }
    if (is_forced && token != only) x = kRefused;
    logits[row + token] = x;
  }
}
