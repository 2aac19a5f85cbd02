// Dense layers with up to 128 tokens per CTA, with the distribution of work of many_tokens.cuh. The
// tokens of a CTA's part of K are panels in shared memory: resident, or streamed through it if they
// do not fit. Warpgroups multiply by them. If the tokens are not stored as panels, one more
// warpgroup copies and permutes rows.
//
// Each warp has a tile and all slices of the group, so the slices are added in registers. Only
// tokens pass through shared memory: 128 bytes per 16 weight rows instead of 512.
#pragma once

#include "group_sums.cuh"
#include "panel_product.cuh"
#include "row_panels.cuh"

// kShares CTAs share kTileCount tiles, in each of kGroups groups of slices. kReady: the tokens are
// stored as panels.
template <class Shape_, int kTileCount, int kGroups_, int kShares, int kWarps, int kStages,
          bool kReady>
struct ManyPanels
    : GroupSums<kTileCount, kGroups_, kShares, Shape_::kColumns / kTokensPerTile, kWarps * 32> {
  using Shape = Shape_;
  using Sums =
      GroupSums<kTileCount, kGroups_, kShares, Shape::kColumns / kTokensPerTile, kWarps * 32>;
  using Sums::first_tile, Sums::first_token, Sums::group, Sums::last_tile, Sums::kTokenTiles,
      Sums::tokens;
  using Panels = PanelStream<Shape::kColumns, Shape::kPanels, kStages, kWarps>;
  using Rows = RowPanels<Panels, Shape::kWeightBlocks>;
  // Threads of the launch; registers of a thread that copies rows, and of the other threads.
  static constexpr int kThreads = (kWarps + (kReady ? 0 : kRowWarps)) * 32;
  static constexpr int kRowRegisters = 56, kRegisters = 224;
  static_assert(kReady || kWarps * kRegisters + kRowWarps * kRowRegisters <=
                              kThreads / 32 * registers_at_entry(kThreads),
                "registers are there");
  static constexpr int kBytes =
      Panels::kBytes + static_cast<int>(sizeof(typename Panels::Barriers));
  static_assert(kWarps % 4 == 0, "warpgroups are whole");

  // The chunks of a warp: every kWarps-th tile of the CTA's range.
  struct Chunks {
    int first, last;
    __device__ __forceinline__ int count() const {
      return ceil_div(last - first, kWarps);
    }
    __device__ __forceinline__ int tile(int round, int) const {
      const int tile = first + round * kWarps + static_cast<int>(threadIdx.x) / 32;
      return tile < last ? tile : -1;
    }
  };
  using Stream = PanelProduct<Shape, Chunks>;

  using Sums::Sums;

  __device__ __forceinline__ Chunks chunks() const {
    return {first_tile, last_tile};
  }
  __device__ __forceinline__ int blocks() const {
    return min(Shape::kBlocks, Shape::kWeightBlocks - group * Shape::kBlocks);
  }
  __device__ __forceinline__ Stream stream(const typename Shape::Units::Stored* weight) const {
    return Stream(weight, chunks(), group * Shape::kBlocks, blocks());
  }

  // Start to copy this group's panels of the result of normed_tokens() or token_panels().
  __device__ __forceinline__ Panels fetch_ready(unsigned char* shared,
                                                const unsigned char* ready) const {
    constexpr int kAllPanels = ceil_div(Shape::kWeightBlocks, 2);
    Panels panels = create(shared);
    const int64_t first = static_cast<int64_t>(blockIdx.y) * kAllPanels + group * Shape::kPanels;
    panels.start(ready + first * Panels::kPanelBytes, chunks().count());
    __syncthreads();
    return panels;
  }

  // Whether this thread copies tokens instead of multiplying.
  static __device__ __forceinline__ bool copies_rows() {
    return !kReady && threadIdx.x >= kWarps * 32;
  }
  // Create resident panels for the rows of ``x``. All threads call create_panels(), which has a
  // barrier. The copying threads then call copy_rows(), after griddepcontrol.wait.
  __device__ __forceinline__ Panels create_panels(unsigned char* shared) const {
    const Panels panels = create(shared);
    __syncthreads();
    return panels;
  }
  __device__ __forceinline__ void copy_rows(const Panels& panels, const uint16_t* x) const {
    registers_lower<kRowRegisters>();
    pdl_wait();
    const int64_t first = static_cast<int64_t>(first_token) * (Shape::kWeightBlocks * 32);
    const int warp = static_cast<int>(threadIdx.x) / 32 - kWarps;
    Rows{panels, x + first + group * Shape::kBlocks * 32, tokens, blocks(), warp}.fill();
  }

  // Multiply; the group's sums of all tiles go to ``sums``.
  __device__ __forceinline__ void multiply(Stream& stream, Panels& panels, unsigned char*,
                                           float* sums) const {
    const int lane = threadIdx.x % 32;
    stream.run(panels, [&](int round, const typename Stream::Sums& own) {
      const int tile = chunks().tile(round, 0);
      if (tile < 0) return;
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
        if (n * kTokensPerTile >= tokens) break;
        float2* to = reinterpret_cast<float2*>(sums + this->sums_at(group, tile, n));
        to[lane] = make_float2(own[0][4 * n], own[0][4 * n + 1]);
        to[32 + lane] = make_float2(own[0][4 * n + 2], own[0][4 * n + 3]);
      }
    });
  }

 private:
  __device__ __forceinline__ Panels create(unsigned char* shared) const {
    auto& barriers = *reinterpret_cast<typename Panels::Barriers*>(shared + Panels::kBytes);
    return Panels(shared, barriers, ceil_div(blocks(), 2));
  }
};
