// A part of a row that is normalized by itself: the embedding, or a segment of the hidden states.
//
// Config: kWidth, kHasTable, kPacked, kSegments, kHasResidual, kHasFactor, kWarps, kNormRounding,
// kEps; kernel.cu has kSharedBytes too.
#pragma once

#include "../../_device/normed_rows.cuh"
#include "../../_device/ptx_load.cuh"
#include "../../_device/table_row.cuh"

CONFIG

constexpr NormRounding kRounding = static_cast<NormRounding>(Config::kNormRounding);
using Rows = NormedRows<Config::kWidth, Config::kWarps, kRounding>;

__device__ __forceinline__ uint32_t added(uint32_t a, uint32_t b) {
  const float2 x = unpack_bf16x2(a), y = unpack_bf16x2(b);
  return pack_bf16x2(x.x + y.x, x.y + y.y);
}

// Part ``index`` of ``parts`` of a row; the embedding is the first.
struct Part {
  int64_t row;
  int index, parts;

  __device__ __forceinline__ Part(int64_t row_, int index_, int parts_)
      : row(row_), index(index_), parts(parts_) {}

  __device__ __forceinline__ bool embeds() const {
    return Config::kHasTable && index == 0;
  }
  __device__ __forceinline__ int segment() const {
    return Config::kHasTable ? 0 : index;
  }
  // The first element of this part in tensors like ``hidden``.
  __device__ __forceinline__ int64_t first() const {
    return (row * Config::kSegments + segment()) * Config::kWidth;
  }
  // The weight of the part's norm.
  __device__ __forceinline__ const uint16_t* weight(const uint16_t* embed_norm,
                                                    const uint16_t* hidden_norm) const {
    return embeds() ? embed_norm : hidden_norm + segment() * Config::kWidth;
  }
  __device__ __forceinline__ TableRow source(const int* token_ids, const uint16_t* table,
                                             const uint16_t* hidden) const {
    if (!embeds()) return TableRow::in_order(hidden + first());
    return TableRow::of(table, load_l2_int(token_ids + row), Config::kWidth, Config::kPacked != 0);
  }
  // Store eight normalized values, the ``i``-th of the part, after the residual and the factor.
  __device__ __forceinline__ void store(uint16_t* u, int i, uint4 value, const uint16_t* residual,
                                        const uint16_t* factor) const {
    if (Config::kHasResidual != 0) {
      const uint4 other = load_l2_16(residual + first() + i * 8);
      value = make_uint4(added(other.x, value.x), added(other.y, value.y), added(other.z, value.z),
                         added(other.w, value.w));
    }
    if (Config::kHasFactor != 0) {
      const uint32_t one = load_early_bf16(factor), pair = one | one << 16;
      value = make_uint4(mul_bf16x2(value.x, pair), mul_bf16x2(value.y, pair),
                         mul_bf16x2(value.z, pair), mul_bf16x2(value.w, pair));
    }
    reinterpret_cast<uint4*>(u + (row * parts + index) * Config::kWidth)[i] = value;
  }
};
