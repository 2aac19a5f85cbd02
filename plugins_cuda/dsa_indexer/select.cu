// DsaIndexer, second launch: the slots that each row attends to, by the scores of the first launch.
//
//   row_start      i32  [B + 1]
//   row_slot, positions  i32 [T]
//   tree_start, budget   i32 [B]
//   ancestor_bits  i32  [T, WORDS]
//   selected       i32  [T, views, held], out
//   workspace_scores  f32 [T, views, score_stride]
//   workspace_counts  i32 [T, views, kDigits]: number of scores with a digit; zeros afterwards
//   workspace_marks   {u32, u32} [T, views, mark_words]: bits of the selected slots, and of those
//                     that have the digit of the last one
//   workspace_arrivals  i32 [T, views]: CTAs that arrived; zeros before and afterwards
//
// Grid (parts of the slots, T, views). The mandatory slots of a row, and their places in the list,
// follow from its position; the first CTA writes them. The row selects the best of the other slots.
// The digit of the last selected one follows from the counts. Each CTA then decides about its slots
// except those with that digit. The last CTA to arrive decides about these (edge.cuh), and writes
// the selected slots, an entry per thread. The order of arrival does not affect the result.
//
// Memory latencies determine the time: of the inputs of a CTA, of the masks of the other CTAs, and
// of the scores of the last digit. At 131k tokens the scores of a row have 512 kB in L2, read once
// by 64 CTAs, and its masks 32 kB.
#include "../_device/arrival.cuh"
#include "../_device/row_sequence.cuh"
#include "device/chosen.cuh"
#include "device/config.cuh"
#include "device/edge.cuh"

namespace {

constexpr int kSlotsOfACta = 4 * Config::kThreads;

// Write the entries that do not depend on scores: the row's first slots, then, after `chosen`
// selected ones, the rest of the chain and the tree's slots. With `all` it writes the slots to
// select from too.
__device__ __forceinline__ void write_kept(int* list, int held, const ListRange& range, int chosen,
                                           bool all, int start, const int* ancestors) {
  const int resumes = range.low + chosen, total = resumes + range.chain - range.late;
  for (int i = threadIdx.x; i < held; i += Config::kThreads) {
    if (i >= range.low && i < resumes && !all) continue;
    int slot = i;
    if (i >= resumes) slot = range.late + i - resumes;
    if (i >= total)
      slot = i < total + range.nodes ? start + set_bit<Config::kWords>(ancestors, i - total) : -1;
    list[i] = slot;
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    select_slots(const int* row_start, const int* row_slot, const int* tree_start,
                 const int* ancestor_bits, const int* positions, const int* budget, int* selected,
                 const float* workspace_scores, int* workspace_counts, uint2* workspace_marks,
                 int* workspace_arrivals, int batch, int capacity, int mark_words, int held,
                 int max_listed, int threshold, int first_tokens, int recent_tokens) {
  DYNAMIC_SHARED(uint32_t, shared_marks);  // [mark_words], as many for `near`, then the list
  __shared__ SelectScratch scratch;
  __shared__ bool last;
  pdl_launch_dependents();
  pdl_wait();
  const int row = blockIdx.y, view = blockIdx.z, views = gridDim.z, lane = threadIdx.x % 32;
  const int64_t place = static_cast<int64_t>(row) * views + view;
  const float* scores = workspace_scores + place * score_stride(capacity);
  int* all_counts = workspace_counts + place * kDigits;

  // The row's position, this thread's digits from the highest on, and its slots.
  const FirstSequences sequences(row_start, batch, tree_start, budget);
  const int row_at = load_l2_int(row_slot + row), position = load_l2_int(positions + row);
  DigitCounts counts;
  counts.load(all_counts);
  const int slot =
      (static_cast<int>(blockIdx.x) * Config::kThreads + static_cast<int>(threadIdx.x)) * 4;
  float4 own = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (slot < capacity) own = *reinterpret_cast<const float4*>(scores + slot);
  const int* ancestors = ancestor_bits + static_cast<int64_t>(row) * Config::kWords;
  const int nodes = bits_below<Config::kWords>(ancestors, 32 * Config::kWords);
  const RowSequence sequence = sequences.of_row(row, row_start, batch, tree_start, budget);

  int* list = selected + place * held;
  const bool whole = sequence.index < batch && (sequence.budget < 0 || position < threshold);
  if (sequence.index == batch || whole) {
    for (int i = threadIdx.x; blockIdx.x == 0 && i < held; i += Config::kThreads) {
      list[i] = whole && i == 0 ? -2 : -1;
    }
    return;
  }
  const ListRange range = list_range(row_at, sequence.start, nodes, first_tokens, recent_tokens);
  const int num_selected = min(sequence.budget, range.others());
  const bool chooses = num_selected > 0 && num_selected < range.others();
  const int parts = chooses ? ceil_div(range.late, kSlotsOfACta) : 1;
  if (static_cast<int>(blockIdx.x) >= parts) return;
  if (!chooses) {
    write_kept(list, held, range, num_selected, true, sequence.start, ancestors);
    return;
  }

  const Edge edge = counts.edge(num_selected, scratch);
  const float mine[4] = {own.x, own.y, own.z, own.w};
  uint32_t take = 0, near = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (slot + i < range.low || slot + i >= range.late) continue;
    const int digit = digit_of(ordered_key(mine[i]));
    if (digit > edge.digit) take |= 1u << i;
    if (digit == edge.digit) near |= 1u << i;
  }
  take <<= slot % 32;
  near <<= slot % 32;
#pragma unroll
  for (int distance = 1; distance < 8; distance *= 2) {
    take |= __shfl_xor_sync(kAllLanes, take, distance);
    near |= __shfl_xor_sync(kAllLanes, near, distance);
  }
  uint2* marks = workspace_marks + place * mark_words;
  if (lane % 8 == 0 && slot < range.late) marks[slot / 32] = make_uint2(take, near);

  __syncthreads();
  if (threadIdx.x == 0) last = arrive(workspace_arrivals + place) == parts - 1;
  __syncthreads();
  if (blockIdx.x == 0) {
    write_kept(list, held, range, num_selected, false, sequence.start, ancestors);
  }
  if (!last) return;
  const int words = ceil_div(range.late, 32);
  const Marks all{shared_marks, shared_marks + mark_words, words};
  all.load(marks);
#pragma unroll
  for (int i = 0; i < kDigits / 4; i += Config::kThreads) {
    reinterpret_cast<uint4*>(all_counts)[i + threadIdx.x] = make_uint4(0, 0, 0, 0);
  }
  if (threadIdx.x == 0) workspace_arrivals[place] = 0;
  __syncthreads();
  const NearSlots slots{all.near + mark_words, max_listed, scores, range.low, range.late};
  resolve_edge(all, edge, slots, scratch);
  all.write(list + range.low, num_selected, scratch);
}
