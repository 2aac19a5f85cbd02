// PagedTreeAttention, after attend_many: merges the states of a row's splits to its result.
//
//   row_start … ancestor_bits, sinks, attended   see attend_split (kernel.cu)
//   workspace_sums, workspace_values             see attend_many (many_rows.cu)
//
// Grid (T, KV_HEADS), with a thread per four columns of a head. A row reads as many states as there
// are chunks of 128 positions up to its own, in order: 16 of them have 34 kB, in L2.
#include "../_device/attention_rows.cuh"
#include "device/attention_slots.cuh"
#include "device/config.cuh"
#include "device/few_rows.cuh"
#include "../_device/row_sequence.cuh"

constexpr int kChunk = 128;
constexpr int kThreads = round_up(kQuads, 32);
static_assert(Config::kWindow == 0, "rows have no window");

extern "C" __global__ void __launch_bounds__(kThreads)
    join_slots(const int* row_start, const int* row_slot, const int* tree_start,
               const int* ancestor_bits, const float* sinks, uint2* attended,
               float2* workspace_sums, float4* workspace_values) {
  pdl_launch_dependents();
  pdl_wait();
  const int row = blockIdx.x;
  const FirstSequences sequences(row_start, Config::kBatch, tree_start, tree_start);
  const RowSequence own = sequences.of_row(row, row_start, Config::kBatch, tree_start, tree_start);
  if (own.index >= Config::kBatch || is_few(row_start, own.index)) return;
  const RowView view = view_of<Config::kWords, Config::kWindow>(
      row_slot[row], own.start, ancestor_bits + row * Config::kWords);
  const int slots = view.end() / kChunk + 1;
  const SlotStates states{workspace_sums, workspace_values, sinks, attended};
  states.join_rows(row, 1, threadIdx.x, kThreads, [&](int slot) { return slot < slots; });
}
