// Choose: three launches; each CTA has a part of a row, 8192 logits.
//
//   workspace_best     [R, parts] ranked key: the largest logit of a part, lowest token on ties
//   workspace_sums     [R, parts] fp32: Σ exp(logit − largest) of a part
//   workspace_counts   [R, parts, 256] uint32, workspace_masses [R, parts, 256] uint64: tokens of a
//                      part by their distance to the row's largest logit, and their mass
//   workspace_kept     [R, 2] int32: the result of top-k and top-p
//   workspace_noisy    [R, parts] ranked key: the best noisy logit of a part
//   workspace_arrived  [2, R] uint32, zeros before and after
//
// summarise_parts reads the row (804 KB for 201088 logits) for the maximum and the sum of
// exponentials. cut_tails does nothing in rows without top-k and top-p. Otherwise it reads the row
// for the histogram; the last CTA of the row then reads it again for the values of the one or two
// buckets with a cut. choose reads the row for the best noisy logit.
//
// An instruction per logit takes one multiprocessor 0.9 µs, so estimates rule out maximum logits
// first. The parts of a row depend on the vocabulary only.
#include "device/choosing.cuh"

// Grid (parts, R), for all three.
extern "C" __global__ void __launch_bounds__(kThreads)
    summarise_parts(const float* logits,       // [R, V]
                    uint64_t* workspace_best,  // out
                    float* workspace_sums,     // out
                    int vocab) {
  pdl_launch_dependents();
  pdl_wait();
  summarise_part(logits, workspace_best, workspace_sums, vocab);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    cut_tails(const float* logits,             // [R, V]
              const float* temperature,        // [R]
              const int* top_k,                // [R]
              const float* top_p,              // [R]
              const float* floor,              // [R] or null
              const uint64_t* workspace_best,  // in
              const float* workspace_sums,     // in
              uint32_t* workspace_counts,      // out
              uint64_t* workspace_masses,      // out
              int* workspace_kept,             // out
              unsigned* workspace_arrived,     // the first half
              int vocab, float unit) {
  DYNAMIC_SHARED(unsigned char, memory);  // cells, then the list
  __shared__ TailScratch tail;
  pdl_launch_dependents();
  pdl_wait();
  const int r = blockIdx.y, parts = gridDim.x;
  const int max_kept = top_k[r] < vocab ? top_k[r] : 0;
  if (temperature[r] == 0.0f || (max_kept <= 0 && !(top_p[r] < 1.0f))) return;
  if (threadIdx.x == 0) {
    tail.histogram.counts = reinterpret_cast<uint32_t*>(memory);
    tail.histogram.masses = tail.histogram.counts + kEdgeCells;
  }
  Row row(logits + static_cast<int64_t>(r) * vocab, vocab);
  const int64_t first = static_cast<int64_t>(r) * parts;
  const Summary summary(workspace_best + first, workspace_sums + first, parts);
  if (floor != nullptr) row.drop(ranked_value(summary.best), floor[r]);
  const Scaled scaled(temperature[r], ranked_value(summary.best));
  TailCut cut(row, scaled, tail, reinterpret_cast<float2*>(memory + kEdgeCellBytes), unit);
  const int64_t digits = (first + blockIdx.x) * kEdgeDigits;
  cut.add_up(row.part(blockIdx.x), workspace_counts + digits, workspace_masses + digits);
  if (!is_last_part(workspace_arrived + r)) return;
  const Kept kept = cut.find(workspace_counts + first * kEdgeDigits,
                             workspace_masses + first * kEdgeDigits, parts, max_kept, top_p[r]);
  if (threadIdx.x == 0) {
    workspace_kept[2 * r] = static_cast<int>(kept.key);
    workspace_kept[2 * r + 1] = kept.last_token;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    choose(const float* logits,             // [R, V]
           const float* temperature,        // [R]
           const int* top_k,                // [R]
           const float* top_p,              // [R]
           const int* seed,                 // [R]
           const int* position,             // [R]
           const float* floor,              // [R] or null
           int* choice,                     // out [R]
           float* logprob,                  // out [R]
           const uint64_t* workspace_best,  // in
           const float* workspace_sums,     // in
           const int* workspace_kept,       // in
           uint64_t* workspace_noisy,       // out
           unsigned* workspace_arrived,     // the second half
           int vocab) {
  pdl_launch_dependents();
  pdl_wait();
  choose_of_part(logits, temperature, top_k, top_p, seed, position, floor, choice, logprob,
                 workspace_best, workspace_sums, workspace_kept, workspace_noisy, workspace_arrived,
                 vocab);
}
