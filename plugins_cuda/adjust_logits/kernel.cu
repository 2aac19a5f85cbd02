// AdjustLogits: a thread has some tokens of a row and does everything to them, so that no thread
// reads what another one writes.
//
// Moves 16 bytes a token: 3.2 MB a row at 201088 logits.
#include "../_device/ptx.cuh"

// As runtime/engine_dir/plan.py has them.
constexpr int kAdjusts = 1, kMaskedRow = 2;
constexpr int kEndsOutput = 1 << 29, kInPrompt = 1 << 30;
// No temperature makes them infinite (runtime/sampling.py, runtime/guides/grammar.py).
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
    adjust_logits(const float* logits,      // [R, V]
                  const int* token_ids,     // [R] or null
                  const int* positions,     // [R]
                  const int* done,          // [R] or null
                  const int* changes,       // [R]
                  const int* min_position,  // [R]
                  const float* repetition,  // [R]
                  const float* frequency,   // [R]
                  const float* presence,    // [R]
                  const float* bias,        // [R, V]
                  const int* mask,          // [R, words]
                  int* marks,               // in and out [R, V]
                  float* adjusted,          // out [R, V]
                  int vocab, int words) {
  pdl_launch_dependents();
  pdl_wait();
  const int r = blockIdx.y, change = load_l2_int(changes + r);
  const int64_t row = static_cast<int64_t>(r) * vocab;
  const bool adjusts = (change & kAdjusts) != 0, is_masked = (change & kMaskedRow) != 0;
  const bool is_live = done == nullptr || load_l2_int(done + r) == 0;
  const int own = token_ids != nullptr && is_live ? load_l2_int(token_ids + r) : -1;
  const bool is_early = load_l2_int(positions + r) < load_l2_int(min_position + r);
  const Penalties penalise{load_l2_float(repetition + r), load_l2_float(frequency + r),
                           load_l2_float(presence + r)};
#pragma unroll
  for (int n = 0; n < kTokens; ++n) {
    const int token = (blockIdx.x * kTokens + n) * kBlock + threadIdx.x;
    if (token >= vocab) return;
    float x = load_l2_float(logits + row + token);
    if (adjusts) {
      int marked = load_l2_int(marks + row + token);
      if (token == own) marks[row + token] = ++marked;
      x = __fadd_rn(x, load_l2_float(bias + row + token));
      if (is_early && (marked & kEndsOutput) != 0) x = kMasked;
      x = penalise(x, marked);
    }
    if (is_masked) {
      const int word = load_l2_int(mask + static_cast<int64_t>(r) * words + token / 32);
      if ((static_cast<uint32_t>(word) >> token % 32 & 1u) == 0) x = kRefused;
    }
    adjusted[row + token] = x;
  }
}
