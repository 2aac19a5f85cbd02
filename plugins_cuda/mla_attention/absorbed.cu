// MlaAttention with absorbed queries: the cache entry of a token is the key of every head.
//
//   q              bf16 [T, Q_HEADS, ENTRY]
//   c_pool         bf16 [pages, 1, PAGE_SIZE, ENTRY]; the first VALUE columns are the value
//   page_table, row_start, … , selected, page_position   see kernel.cu
//   workspace_sums    f32 [T, Q_HEADS, PLACES, 2, 2], out, of used splits (latent_state.cuh)
//   workspace_values  f16 [T, Q_HEADS, PLACES, 8 · kStateUnits], out, of used splits
//   workspace_counts  i32 [T], out: number of used splits
//
// Grid (CTAs, groups of 64 heads). A CTA processes items in sequence: one split of a row for 64
// heads (latent_splits.cuh). One of three warpgroups copies tiles of 64 tokens to a ring of two
// stages, the others accumulate them (absorbed_adder.cuh). project_absorbed merges the splits.
//
// A token takes 2·ENTRY bytes, and 128·(ENTRY + VALUE) operations per row and group of heads. A
// tile of 512 + 64 values has 73.7 KB, 2.2 µs of an SM's share of 4.53 TB/s. S takes 1150 cycles of
// tensor cores, at the full bandwidth of shared memory, which holds both operands. The sums take
// 1030 cycles: 1.25 µs in total.
#include "../_device/ptx_ring.cuh"
#include "device/absorbed_adder.cuh"
#include "device/config.cuh"
#include "device/latent_splits.cuh"

namespace {

// Whether the tokens of a tile are adjacent in the pool if all are committed and visible.
constexpr bool kWithinPages = Config::kPageSize % kTile == 0;

// The copying warpgroup. The previous launch writes the entries of this launch's rows, which are
// the last visible ones. Earlier tiles are copied without waiting for it (launches.py:
// reads_early).
__device__ __forceinline__ void copy_tiles(const uint4* c_pool, const RowInputs& in,
                                           const Memory& memory) {
  // Bit 0: the stage to fill; bit 1 + s: the parity of the number of times stage s was filled.
  uint32_t ring = 0;
  Items items(in, memory.starts);
  while (items.advance()) {
    const int* table = in.page_table + static_cast<int64_t>(items.sequence) * Config::kTable;
    const Span sees = items.rows.span(0, 0);
    ring &= ~1u;
    for (int tile = items.tile; tile < items.end; ++tile) {
      if ((tile + 1) * kTile > sees.last + 1 - Config::kLaunchRows) pdl_wait();
      // The phase before the first one counts as complete.
      const uint32_t stage = ring & 1u, parity = (ring >> (1 + stage) & 1u) ^ 1u;
      const auto fill = [&](const auto& copy) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          mbarrier_wait(memory.empty + kParts * stage + part, parity);
          start_copies<Config::kEvictFirst != 0>(copy, memory.ring + stage * kStageUnits,
                                                 part_start(part), part_start(part + 1));
          cp_async_arrive(memory.full + kParts * stage + part);
        }
      };
      const int first = tile * kTile, last = first + kTile - 1;
      if (kWithinPages && first >= sees.first && last <= items.rows.view[0].chain) {
        fill(AdjoiningCopy{c_pool, table[first / Config::kPageSize] * Config::kPageSize +
                                       first % Config::kPageSize});
      } else {
        TileCopy copy;
        copy.look_up(c_pool, [&](int token) {
          if (!sees.holds(first + token)) return -1;
          const int slot = items.rows.slot_of(first + token, 0);
          return table[slot / Config::kPageSize] * Config::kPageSize + slot % Config::kPageSize;
        });
        fill(copy);
      }
      ring ^= 1u | 2u << stage;
    }
  }
}

template <int group>
__device__ __forceinline__ void add_up(const uint4* q, const RowInputs& in, const Memory& memory,
                                       float2* split_sums, uint4* split_values) {
  Adder<group> adder(memory);
  Items items(in, memory.starts);
  int loaded = -1;
  while (items.advance()) {
    if (items.row != loaded) adder.load_queries(q, items.row);
    loaded = items.row;
    const Span sees = items.rows.span(0, 0);
    adder.clear();
#pragma unroll 1
    for (int tile = items.tile; tile < items.end; tile += 2) {
      const bool pair = tile + 1 < items.end;
      if constexpr (group == 0) {
        adder.take_even(sees, tile);
        if (pair) adder.template take_other<1>();
      } else if (pair) {
        adder.take_two(sees, tile + 1);
      } else {
        adder.template take_other<0>();
      }
    }
    adder.leave(items.row, items.split, split_sums, split_values);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attend_absorbed(const uint4* q, const uint4* c_pool, const int* page_table,
                    const int* row_start, const int* row_slot, const int* tree_start,
                    const int* ancestor_bits, const int* selected, const int* page_position,
                    float2* workspace_sums, uint4* workspace_values, int* workspace_counts) {
  DYNAMIC_SHARED(unsigned char, shared);
  const Memory memory(shared);
  const RowInputs in{page_table, row_start, row_slot, tree_start, ancestor_bits};
  if (threadIdx.x == 0) memory.open_barriers();
  pdl_launch_dependents();
  count_items(in, memory.starts, kThreads);
  if (threadIdx.x >= kConsumers) {
    registers_lower<kCopierRegisters>();
    copy_tiles(c_pool, in, memory);
    pdl_wait();
    leave_counts(in, threadIdx.x - kConsumers, kCopyThreads, workspace_counts);
  } else {
    registers_raise<kConsumerRegisters>();
    pdl_wait();
    if (__shfl_sync(kAllLanes, threadIdx.x / 128, 0) == 0) {
      add_up<0>(q, in, memory, workspace_sums, workspace_values);
    } else {
      add_up<1>(q, in, memory, workspace_sums, workspace_values);
    }
  }
}
