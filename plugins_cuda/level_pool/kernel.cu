// LevelPool: one CTA per sequence, one thread per candidate of a level.
//
// There is one memory latency: the tokens and scores of all levels are in shared memory before the
// first level is computed. A level has one barrier for its scores and one for its frontier. A
// candidate computes its rank by counting the candidates before it.
#include "../_device/ptx.cuh"

constexpr int kMaxTopK = 16;  // tokens of a level, and levels
constexpr int kMaxCandidates = kMaxTopK * kMaxTopK;

struct Levels {
  int tokens[kMaxCandidates];
  float scores[kMaxCandidates];
};

struct Frontier {
  float scores[kMaxTopK];
  int places[kMaxTopK];  // in the pool
};

extern "C" __global__ void __launch_bounds__(kMaxCandidates, 1)
    level_pool(const int* tokens,    // [B, D·K]
               const float* scores,  // [B, D·K]
               int* pool_tokens,     // out [B, M], M = K + (D - 1)·K²
               float* pool_scores,   // out [B, M]
               int* pool_parents,    // out [B, M]
               int depth, int k) {
  __shared__ Levels levels;
  __shared__ Frontier frontier;
  __shared__ float level_scores[kMaxCandidates];
  const int thread = threadIdx.x, entries = depth * k;
  const int64_t sequence = blockIdx.x;
  const int64_t pool = sequence * (k + (depth - 1) * k * k);
  pdl_launch_dependents();
  pdl_wait();
  if (thread < entries) {
    levels.tokens[thread] = load_l2_int(tokens + sequence * entries + thread);
    levels.scores[thread] = load_l2_float(scores + sequence * entries + thread);
  }
  __syncthreads();
  int first = 0, candidates = k;  // of this level
#pragma unroll 1
  for (int level = 0; level < depth; ++level) {
    const bool is_one = thread < candidates;
    const int parent = thread / k, entry = level * k + thread % k;
    float score = 0.0f;
    if (is_one) {
      score = levels.scores[entry] + (level == 0 ? 0.0f : frontier.scores[parent]);
      pool_tokens[pool + first + thread] = levels.tokens[entry];
      pool_scores[pool + first + thread] = score;
      pool_parents[pool + first + thread] = level == 0 ? -1 : frontier.places[parent];
      level_scores[thread] = score;
    }
    if (level == depth - 1) break;
    __syncthreads();
    if (is_one) {
      int before = 0;
      for (int other = 0; other < candidates; ++other) {
        const float of_other = level_scores[other];
        before += of_other > score || (of_other == score && other < thread);
      }
      if (before < k) {
        frontier.scores[before] = score;
        frontier.places[before] = first + thread;
      }
    }
    __syncthreads();
    first += candidates;
    candidates = k * k;
  }
}
