// Products of a packed weight with panels of tokens, on the tensor cores of warpgroups.
//
// Each warp of a warpgroup has kTiles separate tiles of the weight, 16 rows each, as A operands in
// registers. Its four warps share the tokens as the B operand. A panel is thus read from shared
// memory once per 64 weight rows instead of once per 16. The weights are loaded kDepth blocks of 32
// columns ahead, the first ones before the previous launch has finished.
//
// The bits equal those of small_linear.cuh: wgmma adds k16 products with the bits of mma, the
// blocks of a slice of K are added in rising order from zero, and so are the slices.
#pragma once

#include "panel_stream.cuh"
#include "ptx_load.cuh"
#include "ptx_wgmma.cuh"
#include "weight_units.cuh"

// Compile-time sizes. kWeightBlocks: of all of K. kBlocks: of a CTA; the last CTA may have fewer.
// kSliceBlocks: of a slice of K, even if there are several.
template <int kWeightBlocks_, int kBlocks_, int kSliceBlocks_, int kTiles_, int kColumns_,
          int kDepth_, class Units_ = Bf16Units>
struct PanelShape {
  using Units = Units_;
  static constexpr int kWeightBlocks = kWeightBlocks_, kBlocks = kBlocks_;
  static constexpr int kSliceBlocks = kSliceBlocks_, kTiles = kTiles_, kColumns = kColumns_;
  static constexpr int kDepth = kDepth_, kPanels = ceil_div(kBlocks, 2);
  static constexpr int kSteps = round_up(kBlocks, kDepth);
  static constexpr bool kSliced = kSliceBlocks < kBlocks;
  static constexpr bool kSameBlocks = kWeightBlocks % kBlocks == 0;  // of all CTAs
  static constexpr bool kEven = kSameBlocks && kSteps == kBlocks;
  // Rounds of kDepth steps are unrolled if that makes the conditions of the last steps constant:
  // branches between wgmmas took 28 % of a launch (the down projection of 27B on an H200).
  static constexpr int kUnrolled = kSameBlocks && !kEven && kSteps <= 3 * kDepth ? 3 : 1;
  static constexpr int kTileBytes = ceil_div(kWeightBlocks, Units::kBlocks) * Units::kBytes;
  static_assert(kDepth % 2 == 0 && kBlocks % 2 + kSliceBlocks % 2 <= (kSliced ? 0 : 2),
                "panels are complete");
};

// A lane's part of a tile's panel.
template <class Units>
struct HeldPanel {
  static constexpr int kUnits = 2 / Units::kBlocks;
  typename Units::Held units[kUnits];

  // ``place``: this lane's first 16 bytes. A panel of one block has no weights in its second
  // half.
  __device__ __forceinline__ void load(const unsigned char* place, bool whole) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (u > 0 && !whole) break;
      const unsigned char* unit = place + u * Units::kBytes;
#pragma unroll
      for (int piece = 0; piece < Units::kLoads; ++piece) {
        units[u].pieces[piece] = load_early16(unit + piece * kLoadBytes);
      }
      load_scales<Units>(units[u], unit, load_early4);
    }
  }

  // Decode the A operands of its four k steps.
  __device__ __forceinline__ void decode(uint32_t (&a)[4][4]) const {
    Units::template decode<0>(units[0], a[0], a[1]);
    Units::template decode<Units::kBlocks - 1>(units[kUnits - 1], a[2], a[3]);
  }
};

// ``Chunks``: count() rounds; tile(round, t) of this warp, negative if there is none.
template <class Shape, class Chunks>
class PanelProduct {
 public:
  using Units = typename Shape::Units;
  // sums[t][4j + i] is row g (i < 2) or g + 8 of tile t for token 8j + 2·(lane % 4) + i % 2.
  using Sums = float[Shape::kTiles][Shape::kColumns / 2];

  // ``first``, ``blocks``: this CTA's range of K.
  __device__ __forceinline__ PanelProduct(const typename Units::Stored* weight,
                                          const Chunks& chunks, int first, int blocks)
      : chunks_(chunks),
        weight_(reinterpret_cast<const unsigned char*>(weight) +
                first / Units::kBlocks * Units::kBytes + threadIdx.x % 32 * 16),
        blocks_(blocks) {}

  // Start the first loads. Weights are constant, so they do not wait for previous launches.
  __device__ __forceinline__ void start() {
    const Place first = place(0);
#pragma unroll
    for (int i = 0; i < Shape::kDepth; i += 2) load(i, first, i);
  }

  // Pass the sums of every round to finish(round, sums). All warps of the CTA execute the same
  // number of rounds.
  template <class Panels, class Finish>
  __device__ __forceinline__ void run(Panels& panels, Finish finish) {
    const int count = chunks_.count();
    Place here = place(0);
#pragma unroll 1
    for (int round = 0; round < count; ++round) {
      const Place next = place(round + 1);
      Sums sums = {}, slice = {};
#pragma unroll(Shape::kUnrolled)
      for (int base = 0; base < Shape::kSteps; base += Shape::kDepth) {
        const bool last = base + Shape::kDepth >= Shape::kSteps;
        const int ahead = last ? 0 : base + Shape::kDepth;
        const Place from = last ? next : here;
#pragma unroll
        for (int i = 0; i < Shape::kDepth; i += 2) {
          const auto overlap = [&] { load(i, from, ahead + i); };
          if (!holds(base + i)) {
            overlap();
            continue;
          }
          if (begins_slice(base, i)) add(sums, slice);
          multiply(slice, panels.begin(), i, holds(base + i + 1), overlap);
          panels.end();
        }
      }
      if constexpr (Shape::kSliced) {
        add(sums, slice);
        finish(round, sums);
      } else {
        finish(round, slice);
      }
      here = next;
    }
  }

 private:
  // The address of this lane's part of each tile, null if there is no tile.
  struct Place {
    const unsigned char* tile[Shape::kTiles];
  };

  __device__ __forceinline__ Place place(int round) const {
    Place place;
#pragma unroll
    for (int t = 0; t < Shape::kTiles; ++t) {
      const int tile = round < chunks_.count() ? chunks_.tile(round, t) : -1;
      const int64_t at = static_cast<int64_t>(tile) * Shape::kTileBytes;
      place.tile[t] = tile < 0 ? nullptr : weight_ + at;
    }
    return place;
  }

  __device__ __forceinline__ bool holds(int block) const {
    return Shape::kEven || block < (Shape::kUnrolled > 1 ? Shape::kBlocks : blocks_);
  }

  static __device__ __forceinline__ bool begins_slice(int base, int i) {
    if constexpr (!Shape::kSliced) return false;
    // A compile-time condition if slices start at the same positions of every kDepth blocks.
    if constexpr (Shape::kDepth % Shape::kSliceBlocks == 0) return i % Shape::kSliceBlocks == 0;
    return (base + i) % Shape::kSliceBlocks == 0;
  }

  // Load the panel that starts with ``block``.
  __device__ __forceinline__ void load(int slot, const Place& from, int block) {
#pragma unroll
    for (int t = 0; t < Shape::kTiles; ++t) {
      if (from.tile[t] == nullptr || !holds(block)) continue;
      held_[slot / 2][t].load(from.tile[t] + block / Units::kBlocks * Units::kBytes,
                              holds(block + 1));
    }
  }

  // Add the sums of the finished slice to those of the slices before it.
  static __device__ __forceinline__ void add(Sums& sums, Sums& slice) {
#pragma unroll
    for (int t = 0; t < Shape::kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < Shape::kColumns / 2; ++i) {
        sums[t][i] += slice[t][i];
        slice[t][i] = 0.0f;
      }
    }
  }

  // Multiply a panel, or the first half of one. overlap() runs while the tensor cores work.
  template <class Overlap>
  __device__ __forceinline__ void multiply(Sums& sums, const unsigned char* panel, int slot,
                                           bool whole, const Overlap& overlap) {
    uint32_t a[Shape::kTiles][4][4];
#pragma unroll
    for (int t = 0; t < Shape::kTiles; ++t) {
      held_[slot / 2][t].decode(a[t]);
      wgmma_pin(sums[t]);
      wgmma_pin(a[t]);
    }
    const uint64_t matrix = wgmma_matrix(panel);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (k >= 2 && !whole) break;
#pragma unroll
      for (int t = 0; t < Shape::kTiles; ++t) {
        wgmma_bf16<Shape::kColumns>(sums[t], a[t][k], matrix + 2 * k);
      }
    }
    wgmma_commit();
    overlap();
    wgmma_wait<0>();
#pragma unroll
    for (int t = 0; t < Shape::kTiles; ++t) {
      wgmma_pin(sums[t]);
      wgmma_pin(a[t]);
    }
  }

  Chunks chunks_;
  const unsigned char* weight_;
  int blocks_;
  HeldPanel<Units> held_[Shape::kDepth / 2][Shape::kTiles];
};
