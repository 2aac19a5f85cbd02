// RmsIndexer: q = rms(x) · W_q, head weights = rms(x) · W_h; k = rms(x) · W_k, into its page slot.
//
//   x             [rows, 32·K_BLOCKS] bf16, in
//   norm          [32·K_BLOCKS] bf16, in, constant; null without HAS_NORM
//   weight        [TILE_COUNT, K_BLOCKS, 512] bf16, in, constant (rms_indexer/packing.py)
//   write_slot    [rows] int32, in: page · page size + offset
//   key_pool      [pages, 1, page size, WIDTH] bf16, out at the slots
//   q             [rows, HEADS, WIDTH] bf16, out
//   head_weights  [rows, HEADS] bf16, out; ones where there are no tiles behind the key's
//   workspace_tokens, workspace_sums, workspace_arrived   as RmsQkvRope's
//
// Grid and order of sums are RmsQkvRope's. 7.5 MB for GPT-OSS with four heads of 256, 1.7 µs at
// 4.53 TB/s.
#include "../_device/dense_kernel.cuh"

#if !MANY_TOKENS
using Places = DensePlaces<Shape, FRAGMENTS != 0, HAS_NORM != 0, OVERLAY != 0, TOKEN_ROWS>;
static_assert(SHARED_BYTES == Places::kBytes, "as the launch says");
#endif

#include "device/keys.cuh"

constexpr int kWidth = K_BLOCKS * 32, kQueryTiles = HEADS * WIDTH / 16, kKeyTiles = WIDTH / 16;
constexpr bool kWeighted = TILE_COUNT > kQueryTiles + kKeyTiles;

namespace {

struct Tensors {
  const int* write_slot;
  KeyElement* key_pool;
  uint16_t* q;
  uint16_t* head_weights;

  // Where the key of a token goes; 0 for a tile without keys.
  __device__ __forceinline__ int slot_of(int tile, int token) const {
    const bool keyed = tile >= kQueryTiles && tile < kQueryTiles + kKeyTiles;
    return keyed ? load_l2_int(write_slot + token) : 0;
  }

  // Rows g and g + 8 of a tile, of one token.
  __device__ __forceinline__ void store(int tile, int g, int token, int slot, float low,
                                        float high) const {
    const uint16_t first = float_to_bf16(low), second = float_to_bf16(high);
    if (tile < kQueryTiles) {
      uint16_t* out = q + static_cast<int64_t>(token) * (HEADS * WIDTH) + 16 * tile + g;
      out[0] = first;
      out[8] = second;
    } else if (tile < kQueryTiles + kKeyTiles) {
      KeyElement* out =
          key_pool + static_cast<int64_t>(slot) * WIDTH + 16 * (tile - kQueryTiles) + g;
      const uint32_t pair = as_keys(static_cast<uint32_t>(second) << 16 | first);
      out[0] = static_cast<KeyElement>(pair);
      out[8] = static_cast<KeyElement>(pair >> 8 * sizeof(KeyElement));
    } else {
      const int head = 16 * (tile - kQueryTiles - kKeyTiles) + g;
      uint16_t* out = head_weights + static_cast<int64_t>(token) * HEADS + head;
      if (head < HEADS) out[0] = first;
      if (head + 8 < HEADS) out[8] = second;
    }
  }

  __device__ __forceinline__ void weigh_evenly(int tokens, int first) const {
    if (kWeighted || blockIdx.x != 0) return;
    for (int i = threadIdx.x; i < tokens * HEADS; i += WARPS * 32) {
      head_weights[static_cast<int64_t>(first) * HEADS + i] = float_to_bf16(1.0f);
    }
  }
};

#if MANY_TOKENS

// The outputs as GroupSums::emit_all() takes them.
struct Outputs {
  struct Held {
    int tile, g, token, slot;
  };
  const Tensors& tensors;

  __device__ __forceinline__ Held begin(int tile, int g, int token) const {
    return {tile, g, token, tensors.slot_of(tile, token)};
  }
  __device__ __forceinline__ void more(Held&) const {}
  __device__ __forceinline__ void end(const Held& held, float low, float high) const {
    tensors.store(held.tile, held.g, held.token, held.slot, low, high);
  }
};

#endif

}  // namespace

#if MANY_TOKENS

extern "C" __global__ void __launch_bounds__(Many::kThreads, 1)
    rms_indexer_of_many(const uint16_t* x, const Units::Stored* weight, const int* write_slot,
                        KeyElement* key_pool, uint16_t* q, uint16_t* head_weights,
                        const unsigned char* workspace_tokens, float* workspace_sums,
                        unsigned* workspace_arrived, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  const Tensors tensors{write_slot, key_pool, q, head_weights};
  project_many(x, weight, workspace_tokens, workspace_sums, workspace_arrived, rows, shared,
               Outputs{tensors},
               [&](const Many& many) { tensors.weigh_evenly(many.tokens, many.first_token); });
}

#else

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    rms_indexer(const uint16_t* x, const uint16_t* norm, const Units::Stored* weight,
                const int* write_slot, KeyElement* key_pool, uint16_t* q, uint16_t* head_weights,
                int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  pdl_launch_dependents();
  const Chunks chunks{share_of_pairs<TILE_COUNT * 8, UNIT_PAIRS, CTAS>(blockIdx.x)};
  Stream stream(weight, chunks, shared + Places::kRing, slice_of_warp<Shape>());
  stream.start();
  if (HAS_NORM) {
    Places::Fragments::fetch_norm(shared + Places::kNorm, norm);
    cp_async_commit();
  }

  const int first_token = blockIdx.y * Shape::kMostTokens;
  const int tokens = min(Shape::kMostTokens, rows - first_token);
  const Tensors tensors{write_slot, key_pool, q, head_weights};
  const Elements elements(tokens);
  float* partials = reinterpret_cast<float*>(shared + Places::kPartials);

  pdl_wait();
  tensors.weigh_evenly(tokens, first_token);
  stream_tokens<Places, FRAGMENTS != 0, HAS_NORM != 0, NormRounding::kWeightInFp32>(
      stream, shared, x + static_cast<int64_t>(first_token) * kWidth, tokens,
      static_cast<float>(EPS), [] {},
      [&](int chunk, const Stream::Sums& sums) {
        add_slices<Shape, Places::kPartialStride, ONE_CHUNK == 0>(
            partials, sums, elements, [&](int, const Element& e, float low, float high) {
              const int tile = chunks.first_tile(chunk) + e.tile;
              if (!chunks.holds(tile * kPairsPerTile + e.g)) return;
              const int token = first_token + e.token;
              tensors.store(tile, e.g, token, tensors.slot_of(tile, token), low, high);
            });
      });
}

#endif
