// Rows of x as panels in shared memory (panel_stream.cuh). A separate warpgroup copies and converts
// them while the others multiply.
//
// Each of kRowWarps warps processes every kRowWarps-th panel. It copies the rows kAhead of its
// panels ahead, and then permutes them in place into the order of a panel. Products of the first
// panels run while later panels and the weights arrive. The multiplying warps cannot permute panels
// as well: wgmma needs a fence after the permutation, which would wait for their loads of weights.
// Here it waits for the copies of one warp only.
#pragma once

#include "panel_stream.cuh"

constexpr int kRowWarps = 4;

// kRowBlocks: blocks of 32 columns of a row of x.
template <class Panels, int kRowBlocks>
struct RowPanels {
  static_assert(Panels::kResident, "a panel is turned once");

  const Panels& panels;
  const uint16_t* x;  // the first row at the first block
  int tokens, blocks, warp;

  // Copy and permute all panels of this warp; one arrival at the barrier of each panel.
  __device__ __forceinline__ void fill() const {
    const int count = ceil_div(blocks, 2);
#pragma unroll 1
    for (int panel = warp - kAhead * kRowWarps; panel < count; panel += kRowWarps) {
      copy(panel + kAhead * kRowWarps);
      if (panel < 0) continue;
      // One group of copies per panel; groups after the last panel are empty.
      cp_async_wait<kAhead>();
      __syncwarp();
      permute(panel);
      fence_async_shared();
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(panels.barrier(panel));
    }
  }

 private:
  // A piece is 8 tokens of a panel; a lane has 16 bytes of each of its two blocks.
  static constexpr int kPieceRows = 8, kBytesAhead = 64 << 10;
  static constexpr int kAhead = ceil_div(kBytesAhead, kRowWarps* Panels::kPanelBytes);

  // The address of 16 bytes ``chunk`` of a block, in this lane's row of a piece.
  __device__ __forceinline__ unsigned char* place(int panel, int piece, int block,
                                                  int chunk) const {
    const int g = threadIdx.x % 32 / 4, at = (4 * block + chunk) ^ g;
    return panels.place(panel) + (piece * kPieceRows + g) * kPanelRowBytes + (at << 4);
  }

  __device__ __forceinline__ void copy(int panel) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll 4
    for (int piece = 0; piece < ceil_div(tokens, kPieceRows); ++piece) {
      const int row = piece * kPieceRows + g;
      const uint16_t* from = x + static_cast<int64_t>(row) * (kRowBlocks * 32) + t * 8;
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        if (row >= tokens || 2 * panel + b >= blocks) continue;
        cp_async_16(place(panel, piece, b, t), from + (2 * panel + b) * 32);
      }
    }
    cp_async_commit();
  }

  // Four lanes have four chunks: each lane reads its word of all of them and writes one chunk.
  __device__ __forceinline__ void permute(int panel) const {
    constexpr int kAtOnce = 2;
    const int t = threadIdx.x % 4, count = ceil_div(tokens, kPieceRows);
#pragma unroll 1
    for (int first = 0; first < count; first += kAtOnce) {
      uint32_t words[kAtOnce][2][4];
#pragma unroll
      for (int p = 0; p < kAtOnce; ++p) {
        if (first + p >= count) break;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          words[p][i / 4][i % 4] =
              *reinterpret_cast<const uint32_t*>(place(panel, first + p, i / 4, i % 4) + t * 4);
        }
      }
      __syncwarp();
#pragma unroll
      for (int p = 0; p < kAtOnce; ++p) {
        if (first + p >= count) break;
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          *reinterpret_cast<uint4*>(place(panel, first + p, b, t)) =
              make_uint4(words[p][b][0], words[p][b][1], words[p][b][2], words[p][b][3]);
        }
      }
    }
  }
};
