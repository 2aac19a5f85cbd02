// Dense layers of more tokens than many_tokens.cuh is good for, cut the same way, up to 128 a CTA:
// the tokens of a CTA's part of K stand in shared memory as panels, or pass through it where they
// do not fit, and warpgroups multiply by them. Where they do not come as panels, one more warpgroup
// brings them.
//
// Each warp has a tile and all slices of the group, so that slices meet in registers: nothing goes
// through shared memory but the tokens, 128 bytes of them for 16 rows of the weight in place of
// 512.
#pragma once

#include "group_sums.cuh"
#include "panel_product.cuh"
#include "row_panels.cuh"

// kShares CTAs share kTileCount tiles; each of kGroups groups of slices has as many. kReady: the
// tokens come as panels.
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
  // Of the launch; registers of a thread that brings rows, and of the others beside it.
  static constexpr int kThreads = (kWarps + (kReady ? 0 : kRowWarps)) * 32;
  static constexpr int kRowRegisters = 56, kRegisters = 224;
  static_assert(kReady || kWarps * kRegisters + kRowWarps * kRowRegisters <=
                              kThreads / 32 * registers_at_entry(kThreads),
                "registers are there");
  static constexpr int kBytes =
      Panels::kBytes + static_cast<int>(sizeof(typename Panels::Barriers));
  static_assert(kWarps % 4 == 0, "warpgroups are whole");

  // Every kWarps-th tile of the CTA's run.
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

  // Starts to fetch this group's panels of what normed_tokens() or token_panels() left.
  __device__ __forceinline__ Panels fetch_ready(unsigned char* shared,
                                                const unsigned char* ready) const {
    constexpr int kAllPanels = ceil_div(Shape::kWeightBlocks, 2);
    Panels panels = stand(shared);
    const int64_t first = static_cast<int64_t>(blockIdx.y) * kAllPanels + group * Shape::kPanels;
    panels.start(ready + first * Panels::kPanelBytes, chunks().count());
    __syncthreads();
    return panels;
  }

  // Whether this thread brings the tokens that the others multiply by.
  static __device__ __forceinline__ bool brings_rows() {
    return !kReady && threadIdx.x >= kWarps * 32;
  }
  // Panels of the rows of ``x``, every one in its place: all threads stand them, with a barrier of
  // the CTA, and those threads then bring them, behind the wait for the launch in front.
  __device__ __forceinline__ Panels stand_rows(unsigned char* shared) const {
    const Panels panels = stand(shared);
    __syncthreads();
    return panels;
  }
  __device__ __forceinline__ void bring_rows(const Panels& panels, const uint16_t* x) const {
    registers_lower<kRowRegisters>();
    pdl_wait();
    const int64_t first = static_cast<int64_t>(first_token) * (Shape::kWeightBlocks * 32);
    const int warp = static_cast<int>(threadIdx.x) / 32 - kWarps;
    Rows{panels, x + first + group * Shape::kBlocks * 32, tokens, blocks(), warp}.bring();
  }

  // The group's sums of all tiles go to ``sums``.
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
  __device__ __forceinline__ Panels stand(unsigned char* shared) const {
    auto& barriers = *reinterpret_cast<typename Panels::Barriers*>(shared + Panels::kBytes);
    return Panels(shared, barriers, ceil_div(blocks(), 2));
  }
};
