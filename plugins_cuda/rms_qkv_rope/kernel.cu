// RmsQkvRope: q, k, v = rms(x) · Wᵀ (+ bias), q and k rotated, k and v into their page slots. With
// HEAD_NORMS q and k are left as they are projected, for normed_heads.cu.
//
//   x           [rows, 32·K_BLOCKS] bf16, in
//   norm        [32·K_BLOCKS] bf16, in, constant; null without HAS_NORM
//   weight      [TILE_COUNT, K_BLOCKS, 512] bf16, in, constant (rms_qkv_rope/packing.py); or
//               stored as WEIGHTS says (linear/block_scaled.py)
//   bias        [16·TILE_COUNT] bf16, in, constant, in packed order; null without HAS_BIAS
//   cos, sin    [positions, HEAD_DIM/2] fp32, in, constant
//   positions   [rows] int32, in
//   write_slot  [rows] int32, in: page · PAGE_SIZE + offset
//   k_pool      [pages, KV_HEADS, PAGE_SIZE, HEAD_DIM] bf16, out at the slots
//   v_pool      as k_pool
//   q           [rows, Q_HEADS, HEAD_DIM] bf16, out
//   workspace_tokens   with TOKENS_READY: tokens, as linear/normed_tokens.cu or token_panels.cu
//                      describes them
//   workspace_sums     [groups of tokens][SLICES / GROUP_SLICES][TILE_COUNT][TOKEN_TILES][128] fp32
//   workspace_arrived  [groups of tokens, CTAS] uint32, zeros before and after
//
// Grid (CTAs over pairs of weight rows, groups of 8·TOKEN_TILES tokens). Rows g and g + 8 of a tile
// are elements i and i + HEAD_DIM/2 of a head, so one thread rotates what it has added up.
// 29.5 MB for GPT-OSS, 6.5 µs at 4.53 TB/s; every CTA norms the tokens for itself. With MANY_TOKENS
// they come normed, and the CTAs also split K (_device/many_tokens.cuh).
#include "../_device/dense_pairs.cuh"

constexpr int kTilesPerHead = HEAD_DIM / 16, kHalf = HEAD_DIM / 2;

namespace {

struct Tensors {
  const float* cos;
  const float* sin;
  const int* positions;
  const int* write_slot;
  uint16_t* k_pool;
  uint16_t* v_pool;
  uint16_t* q;
};

// What one thread needs beside the sums for a pair of outputs, fetched in the order in which it can
// be known: constants, then the token's place, then the tables at it.
struct Pair {
  int head, i, token;
  float bias[2];
  int position, slot;
  float cosine, sine;

  Pair() = default;
  __device__ __forceinline__ Pair(int tile, int g, int token_)
      : head(tile / kTilesPerHead), i(tile % kTilesPerHead * 8 + g), token(token_) {}

  __device__ __forceinline__ bool is_value() const {
    return head >= Q_HEADS + KV_HEADS;
  }
  __device__ __forceinline__ void load_bias(const uint16_t* bias_row) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bias[half] = HAS_BIAS ? bf16_to_float(load_early_bf16(bias_row + 8 * half)) : 0.0f;
    }
  }
  __device__ __forceinline__ void load_place(const Tensors& tensors) {
    position = load_l2_int(tensors.positions + token);
    slot = load_l2_int(tensors.write_slot + token);
  }
  __device__ __forceinline__ void load_tables(const Tensors& tensors) {
    cosine = 1.0f;
    sine = 0.0f;
    if (HEAD_NORMS || is_value()) return;
    const int64_t entry = static_cast<int64_t>(position) * kHalf + i;
    cosine = load_constant_float(tensors.cos + entry);
    sine = load_constant_float(tensors.sin + entry);
  }
  __device__ __forceinline__ void store(const Tensors& tensors, float low, float high) const {
    const float first = bf16_to_float(float_to_bf16(low + bias[0]));
    const float second = bf16_to_float(float_to_bf16(high + bias[1]));
    uint16_t* out = place(tensors);
    if (HEAD_NORMS || is_value()) {
      out[0] = float_to_bf16(first);
      out[kHalf] = float_to_bf16(second);
    } else {
      out[0] = float_to_bf16(first * cosine - second * sine);
      out[kHalf] = float_to_bf16(second * cosine + first * sine);
    }
  }

 private:
  __device__ __forceinline__ uint16_t* place(const Tensors& tensors) const {
    if (head < Q_HEADS) {
      return tensors.q + (static_cast<int64_t>(token) * Q_HEADS + head) * HEAD_DIM + i;
    }
    uint16_t* pool = is_value() ? tensors.v_pool : tensors.k_pool;
    const int64_t kv_head = (head - Q_HEADS) % KV_HEADS;
    const int64_t page = slot / PAGE_SIZE;
    return pool + ((page * KV_HEADS + kv_head) * PAGE_SIZE + slot % PAGE_SIZE) * HEAD_DIM + i;
  }
};

}  // namespace

#if MANY_TOKENS

extern "C" __global__ void __launch_bounds__(Many::kThreads, 1)
    rms_qkv_rope_of_many(const uint16_t* x, const Units::Stored* weight, const uint16_t* bias,
                         const float* cos, const float* sin, const int* positions,
                         const int* write_slot, uint16_t* k_pool, uint16_t* v_pool, uint16_t* q,
                         const unsigned char* workspace_tokens, float* workspace_sums,
                         unsigned* workspace_arrived, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  const Tensors tensors{cos, sin, positions, write_slot, k_pool, v_pool, q};
  project_pairs<Pair>(tensors, x, weight, bias, workspace_tokens, workspace_sums, workspace_arrived,
                      rows, shared);
}

#else

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    rms_qkv_rope(const uint16_t* x, const uint16_t* norm, const Units::Stored* weight,
                 const uint16_t* bias, const float* cos, const float* sin, const int* positions,
                 const int* write_slot, uint16_t* k_pool, uint16_t* v_pool, uint16_t* q, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  const Tensors tensors{cos, sin, positions, write_slot, k_pool, v_pool, q};
  project_pairs<Pair>(tensors, x, norm, weight, bias, rows, shared);
}

#endif
