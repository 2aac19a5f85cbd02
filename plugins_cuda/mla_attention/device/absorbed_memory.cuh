// The shared memory of a CTA of absorbed attention, and its barriers.
//
// Config: the members of latent_rows.cuh and latent_state.cuh, and SCALE.
#pragma once

#include "../../_device/attention_softmax.cuh"
#include "../../_device/ptx_wgmma_shared.cuh"
#include "config.cuh"
#include "latent_copy.cuh"
#include "latent_state.cuh"

constexpr int kHeads = 64;
constexpr int kConsumers = 256, kThreads = kConsumers + kCopyThreads;
constexpr int kStages = 2;  // one for even, one for odd tiles
constexpr int kEntrySteps = Config::kEntry / 16;
constexpr int kLastPanel = kEntryPanels - 1;
constexpr int kHeldSteps = kEntrySteps - 4 * kLastPanel;
constexpr int kQueryUnits = kHeads * 8;  // of a panel
// The parts of a tile, which have separate barriers: the panels whose values warpgroup 0 sums, and
// the others. If both sum the middle panel, both release both parts.
constexpr int kParts = 2, kFirstPanels = kValuePanels / 2;
constexpr int kReaders = kValuePanels % 2 == 0 ? 1 : 2;
constexpr int kOwnColumns = 64 * kOwnPanels;
constexpr int kHalves = 2;  // of a tile's weights, which have separate barriers
constexpr float kScale = static_cast<float>(Config::kScale) * kLog2E;
// The maximum difference of a score above the base of the weights.
constexpr float kSlack = 8.0f / kScale;
// With few summed columns, the copying warpgroup gets the registers that they save.
constexpr int kConsumerRegisters = kOwnColumns > 192 ? 232 : 208;
constexpr int kCopierRegisters = 3 * registers_at_entry(kThreads) - 2 * kConsumerRegisters;
static_assert(kThreads == 3 * 128 && kCopierRegisters >= 40,
              "three warpgroups share the registers");
static_assert(Config::kTile == 64 && Config::kScale > 0 && Config::kValue % 16 == 0 &&
                  kOwnColumns <= 256,
              "see above");

// The last panel of the queries is in registers; weights of odd tiles replace it in shared memory.
constexpr int kSharedBytes = 16 * (kStages * kStageUnits + (kEntryPanels + 1) * kQueryUnits) +
                             4 * 6 * kHeads + 8 * (2 * kStages * kParts + 2 * kHalves + 2) +
                             4 * (Config::kBatch + 1);
static_assert(kSharedBytes == Config::kSharedBytes, "the launch requests the layout below");

struct Memory {
  uint4* ring;          // [kStages][kStageUnits]
  uint4* queries;       // [kEntryPanels][kHeads][8]
  uint4* even_weights;  // [kHeads][8]
  float* rescale;       // [2][kHeads]: factors of the sums before a tile
  float* bases;         // [2][kHeads]: the base of a tile's weights
  float* totals;        // [2][kHeads]
  Mbarrier* full;       // [kStages][kParts]
  Mbarrier* empty;      // [kStages][kParts]
  Mbarrier* weighed;    // [2][kHalves]: weights are available
  Mbarrier* spent;      // [2]: weights have been used
  int* starts;          // [BATCH + 1]

  __device__ __forceinline__ explicit Memory(unsigned char* shared) {
    ring = reinterpret_cast<uint4*>(shared);
    queries = ring + kStages * kStageUnits;
    even_weights = queries + kEntryPanels * kQueryUnits;
    rescale = reinterpret_cast<float*>(even_weights + kQueryUnits);
    bases = rescale + 2 * kHeads;
    totals = bases + 2 * kHeads;
    full = reinterpret_cast<Mbarrier*>(totals + 2 * kHeads);
    empty = full + kStages * kParts;
    weighed = empty + kStages * kParts;
    spent = weighed + 2 * kHalves;
    starts = reinterpret_cast<int*>(spent + 2);
  }

  __device__ __forceinline__ uint4* weights(int parity) const {
    return parity == 0 ? even_weights : queries + kLastPanel * kQueryUnits;
  }

  __device__ __forceinline__ void open_barriers() const {
    for (int i = 0; i < kStages * kParts; ++i) mbarrier_init(full + i, kCopyThreads);
    for (int i = 0; i < kStages * kParts; ++i) mbarrier_init(empty + i, kReaders * 4);
    for (int i = 0; i < 2 * kHalves; ++i) mbarrier_init(weighed + i, kConsumers / 64);
    for (int i = 0; i < 2; ++i) mbarrier_init(spent + i, kConsumers / 32);
    mbarrier_init_fence();
  }
};

// The first panel of a part; for the part past the last, the number of panels of a tile.
__device__ __forceinline__ constexpr int part_start(int part) {
  return part == 0 ? 0 : part == 1 ? kFirstPanels : kEntryPanels;
}
