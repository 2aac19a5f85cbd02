// Dense layers of more tokens than many_tokens.cuh is good for, cut the same way, up to 128 a CTA:
// the tokens of a CTA's part of K stand in shared memory as panels, or pass through it where they
// do not fit, and warpgroups multiply by them.
//
// Each warp has a tile and all slices of the group, so that slices meet in registers: nothing goes
// through shared memory but the tokens, 128 bytes of them for 16 rows of the weight in place of
// 512.
#pragma once

#include "group_sums.cuh"
#include "panel_product.cuh"

// kShares CTAs share kTileCount tiles; each of kGroups groups of slices has as many.
template <class Shape_, int kTileCount, int kGroups_, int kShares, int kWarps, int kStages>
struct ManyPanels
    : GroupSums<kTileCount, kGroups_, kShares, Shape_::kColumns / kTokensPerTile, kWarps * 32> {
  using Shape = Shape_;
  using Sums =
      GroupSums<kTileCount, kGroups_, kShares, Shape::kColumns / kTokensPerTile, kWarps * 32>;
  using Sums::first_tile, Sums::first_token, Sums::group, Sums::last_tile, Sums::kGroups,
      Sums::kTileFloats, Sums::kTokenTiles, Sums::tokens;
  using Panels = PanelStream<Shape::kColumns, Shape::kPanels, kStages, kWarps>;
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
  __device__ __forceinline__ Stream stream(const uint16_t* weight) const {
    return Stream(weight, chunks(), group * Shape::kBlocks, blocks());
  }

  // Starts to fetch this group's panels of what normed_tokens() or token_panels() left.
  __device__ __forceinline__ Panels fetch_ready(unsigned char* shared,
                                                const unsigned char* ready) const {
    constexpr int kAllPanels = ceil_div(Shape::kWeightBlocks, 2);
    Panels panels = stand(shared, 1);
    const int64_t first = static_cast<int64_t>(blockIdx.y) * kAllPanels + group * Shape::kPanels;
    panels.start(ready + first * Panels::kPanelBytes, chunks().count());
    __syncthreads();
    return panels;
  }

  // The same of the rows of ``x``, where every panel has a place. Each warp copies 8 tokens of a
  // panel as they are, then turns them into the order of a panel where they stand.
  __device__ __forceinline__ Panels fetch_rows(unsigned char* shared, const uint16_t* x) const {
    const Panels panels = stand(shared, kWarps);
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    each_piece([&](int panel, int n) {
      const int token = n * kTokensPerTile + g;
      const uint16_t* from =
          x + static_cast<int64_t>(first_token + token) * (Shape::kWeightBlocks * 32) +
          (group * Shape::kBlocks + 2 * panel) * 32 + t * 8;
      unsigned char* row = panels.place(panel) + token * kPanelRowBytes;
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        if (token >= tokens || 2 * panel + b >= blocks()) continue;
        cp_async_16(row + chunk_at(b, t, g), from + b * 32);
      }
    });
    cp_async_commit();
    __syncthreads();
    cp_async_wait<0>();
    __syncwarp();
    each_piece([&](int panel, int n) {
      unsigned char* row = panels.place(panel) + (n * kTokensPerTile + g) * kPanelRowBytes;
      uint32_t words[2][4];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        words[i / 4][i % 4] =
            *reinterpret_cast<const uint32_t*>(row + chunk_at(i / 4, i % 4, g) + t * 4);
      }
      __syncwarp();
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        *reinterpret_cast<uint4*>(row + chunk_at(b, t, g)) =
            make_uint4(words[b][0], words[b][1], words[b][2], words[b][3]);
      }
    });
    fence_async_shared();
    __syncwarp();
    for (int panel = threadIdx.x % 32; panel < Shape::kPanels; panel += 32) {
      mbarrier_arrive(panels.barrier(panel));
    }
    return panels;
  }

  // The group's sums of all tiles go to ``sums``; true for the last CTA of the share, for which all
  // groups' are there.
  __device__ __forceinline__ bool multiply(Stream& stream, Panels& panels, unsigned char*,
                                           float* sums, unsigned* arrived) const {
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
    return this->is_last(arrived);
  }

 private:
  __device__ __forceinline__ Panels stand(unsigned char* shared, int arrivals) const {
    auto& barriers = *reinterpret_cast<typename Panels::Barriers*>(shared + Panels::kBytes);
    return Panels(shared, barriers, ceil_div(blocks(), 2), arrivals);
  }

  // visit(panel, group of 8 tokens), shared out among the warps.
  template <class Visit>
  __device__ __forceinline__ void each_piece(const Visit& visit) const {
    const int live_tiles = ceil_div(tokens, kTokensPerTile);
    const int count = ceil_div(blocks(), 2) * live_tiles;
#pragma unroll 2
    for (int i = threadIdx.x / 32; i < count; i += kWarps) visit(i / live_tiles, i % live_tiles);
  }

  // Where 16 bytes ``chunk`` of a block of a panel stand in row g of 8.
  static __device__ __forceinline__ int chunk_at(int block, int chunk, int g) {
    return ((4 * block + chunk) ^ g) << 4;
  }
};
