// RmsQueryLatent: q = rms(x) · W_qᵀ (+ bias), rotated; c = rms(x) · W_c, into its page slot.
//
//   x           [rows, 32·K_BLOCKS] bf16, in
//   norm        [32·K_BLOCKS] bf16, in, constant; null without HAS_NORM
//   weight      [TILE_COUNT, K_BLOCKS, 512] bf16, in, constant (rms_query_latent/packing.py)
//   bias        [16·TILE_COUNT] bf16, in, constant, in packed order; null without HAS_BIAS
//   cos, sin    [positions, HEAD_DIM/2] fp32, in, constant
//   positions   [rows] int32, in
//   write_slot  [rows] int32, in: page · page size + offset
//   c_pool      [pages, 1, page size, LATENT] bf16, out at the slots
//   q           [rows, Q_HEADS, HEAD_DIM] bf16, out
//   workspace_tokens, workspace_sums, workspace_arrived   as RmsQkvRope's
//
// Grid and order of sums are RmsQkvRope's. Rows g and g + 8 of a tile are elements i and i +
// HEAD_DIM/2 of a head, or 8 columns of a latent apart. 26.5 MB for GPT-OSS and a latent of 512,
// 5.9 µs at 4.53 TB/s.
#include "../_device/dense_pairs.cuh"

constexpr int kTilesPerHead = HEAD_DIM / 16, kHalf = HEAD_DIM / 2;
constexpr int kQueryTiles = Q_HEADS * kTilesPerHead;

namespace {

struct Tensors {
  const float* cos;
  const float* sin;
  const int* positions;
  const int* write_slot;
  uint16_t* c_pool;
  uint16_t* q;
};

// What one thread needs beside the sums for a pair of outputs, fetched in the order in which it can
// be known: constants, then the token's place, then the tables at it.
struct Pair {
  int tile, i, token;  // i: of a head, or of a latent's 16 columns
  float bias[2];
  int place;  // the token's position, or its slot
  float cosine, sine;

  Pair() = default;
  __device__ __forceinline__ Pair(int tile_, int g, int token_)
      : tile(tile_), i(tile_ < kQueryTiles ? tile_ % kTilesPerHead * 8 + g : g), token(token_) {}

  __device__ __forceinline__ bool is_latent() const {
    return tile >= kQueryTiles;
  }
  __device__ __forceinline__ void load_bias(const uint16_t* bias_row) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bias[half] = HAS_BIAS ? bf16_to_float(load_early_bf16(bias_row + 8 * half)) : 0.0f;
    }
  }
  __device__ __forceinline__ void load_place(const Tensors& tensors) {
    place = load_l2_int((is_latent() ? tensors.write_slot : tensors.positions) + token);
  }
  __device__ __forceinline__ void load_tables(const Tensors& tensors) {
    cosine = 1.0f;
    sine = 0.0f;
    if (is_latent()) return;
    const int64_t entry = static_cast<int64_t>(place) * kHalf + i;
    cosine = load_constant_float(tensors.cos + entry);
    sine = load_constant_float(tensors.sin + entry);
  }
  __device__ __forceinline__ void store(const Tensors& tensors, float low, float high) const {
    const uint16_t first = float_to_bf16(low + bias[0]), second = float_to_bf16(high + bias[1]);
    if (is_latent()) {
      uint16_t* out =
          tensors.c_pool + static_cast<int64_t>(place) * LATENT + 16 * (tile - kQueryTiles) + i;
      out[0] = first;
      out[8] = second;
      return;
    }
    const float a = bf16_to_float(first), b = bf16_to_float(second);
    uint16_t* out =
        tensors.q + (static_cast<int64_t>(token) * Q_HEADS + tile / kTilesPerHead) * HEAD_DIM + i;
    out[0] = float_to_bf16(a * cosine - b * sine);
    out[kHalf] = float_to_bf16(b * cosine + a * sine);
  }
};

}  // namespace

#if MANY_TOKENS

extern "C" __global__ void __launch_bounds__(Many::kThreads, 1)
    rms_query_latent_of_many(const uint16_t* x, const Units::Stored* weight, const uint16_t* bias,
                             const float* cos, const float* sin, const int* positions,
                             const int* write_slot, uint16_t* c_pool, uint16_t* q,
                             const unsigned char* workspace_tokens, float* workspace_sums,
                             unsigned* workspace_arrived, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  const Tensors tensors{cos, sin, positions, write_slot, c_pool, q};
  project_pairs<Pair>(tensors, x, weight, bias, workspace_tokens, workspace_sums, workspace_arrived,
                      rows, shared);
}

#else

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    rms_query_latent(const uint16_t* x, const uint16_t* norm, const Units::Stored* weight,
                     const uint16_t* bias, const float* cos, const float* sin, const int* positions,
                     const int* write_slot, uint16_t* c_pool, uint16_t* q, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  const Tensors tensors{cos, sin, positions, write_slot, c_pool, q};
  project_pairs<Pair>(tensors, x, norm, weight, bias, rows, shared);
}

#endif
