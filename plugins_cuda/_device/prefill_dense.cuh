// Dense operands of the prefill GEMM: packed weights, and tiles of one group of rows.
//
// C: the members that prefill_gemm.cuh needs, and kWeights, the storage of the weights.
#pragma once

#include "prefill_gemm.cuh"
#include "ptx_load.cuh"
#include "stored_weights.cuh"

// A packed tile of 16 rows; a lane's part of a panel of 64 columns is one or two units.
template <class C>
struct DenseWeights {
  static constexpr int kAhead = C::kColumns > 128 ? 2 : 4;
  using Units = typename WeightUnits<C::kWeights>::Units;
  static constexpr int kUnits = ceil_div(C::kKBlocks, Units::kBlocks);
  static constexpr int kPanelUnits = 2 / Units::kBlocks;
  struct Raw {
    typename Units::Held units[kPanelUnits];
  };
  const unsigned char* at;

  DenseWeights() = default;
  __device__ __forceinline__ DenseWeights(const typename Units::Stored* packed, int row_tile)
      : at(reinterpret_cast<const unsigned char*>(packed) +
           static_cast<size_t>(min(row_tile, C::kRowTiles - 1)) * kUnits * Units::kBytes +
           threadIdx.x % 32 * 16) {}

  __device__ __forceinline__ void load_next(Raw& raw, int panel) {
    if (panel >= TileRing<C>::kPanels) return;
#pragma unroll
    for (int i = 0; i < kPanelUnits; ++i) {
      const bool there = kUnits % kPanelUnits == 0 || kPanelUnits * panel + i < kUnits;
      const unsigned char* const unit = at + i * Units::kBytes;
#pragma unroll
      for (int piece = 0; piece < Units::kLoads; ++piece) {
        raw.units[i].pieces[piece] =
            there ? load_constant16(unit + piece * kLoadBytes) : make_uint4(0, 0, 0, 0);
      }
      load_scales<Units>(raw.units[i], unit, [](const void* of) { return load_constant4(of); });
    }
    at += kPanelUnits * Units::kBytes;
  }

  static __device__ __forceinline__ void decode(const Raw& raw, uint32_t (&a)[4][4]) {
    Units::template decode<0>(raw.units[0], a[0], a[1]);
    Units::template decode<1>(raw.units[kPanelUnits - 1], a[2], a[3]);
  }
};

// The base of dense GEMMs: all rows are one group; CTAs take tiles in turn, weight rows fastest.
template <class C>
struct DenseGemm {
  using Weights = DenseWeights<C>;
  static constexpr bool kAnyColumns = false;
  static constexpr int kRowTiles = ceil_div(C::kRowTiles, kConsumerWarps);
  const typename Weights::Units::Stored* weight;
  const unsigned char* panel_start;
  int rows;

  __device__ __forceinline__ int token_tiles() const {
    return ceil_div(rows, C::kColumns);
  }
  __device__ __forceinline__ const unsigned char* panels() const {
    return panel_start;
  }
  __device__ __forceinline__ int panel_rows() const {
    return token_tiles() * C::kColumns;
  }
  __device__ __forceinline__ int first() const {
    return blockIdx.x;
  }
  __device__ __forceinline__ int next(const GemmTile& one) const {
    return one.first / C::kColumns * kRowTiles + one.row_tile / kConsumerWarps + gridDim.x;
  }
  __device__ __forceinline__ int lookup(int id) const {
    return id;
  }
  __device__ __forceinline__ GemmTile tile(int id) const {
    if (id >= kRowTiles * token_tiles()) return no_tile();
    const int first = id / kRowTiles * C::kColumns;
    return {id % kRowTiles * kConsumerWarps, 0, first, C::kColumns, min(C::kColumns, rows - first)};
  }
  __device__ __forceinline__ Weights weights(const GemmTile&, int row_tile) const {
    return {weight, row_tile};
  }
};
