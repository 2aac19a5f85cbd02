// RmsSwiglu: h = silu(n · Gᵀ) · (n · Uᵀ) of n = rms(x), cast before its weight; gate and up may
// have biases.
//
//   x        [rows, 32·K_BLOCKS] bf16, in
//   norm     [32·K_BLOCKS] bf16, in, constant
//   gate_up  [TILE_COUNT, K_BLOCKS, 512] bf16, in, constant (rms_swiglu/packing.py); or stored as
//            WEIGHTS says (linear/block_scaled.py)
//   bias     [16·TILE_COUNT] bf16, in, constant, in packed order; null without HAS_BIAS
//   h        [rows, 8·TILE_COUNT] bf16, out
//   workspace_tokens   normed tokens, as linear/normed_tokens.cu describes them
//   workspace_sums     [groups of tokens][SLICES / GROUP_SLICES][TILE_COUNT][TOKEN_TILES][128] fp32
//   workspace_arrived  [groups of tokens, CTAS] uint32, zeros before and after
//
// Grid (CTAs over tiles, groups of 8·TOKEN_TILES tokens). Row g of a tile is a gate, row g + 8 the
// up row that goes with it. 199 MB for a GPT-OSS draft, 44 µs at 4.53 TB/s; 2160 tiles over 132
// CTAs are 17 at most, 16.4 on average: 96 %. With MANY_TOKENS the tokens come normed, and the CTAs
// also split K (_device/many_tokens.cuh).
#include "../_device/dense_kernel.cuh"

#if !MANY_TOKENS
using Places = DensePlaces<Shape, true, true, OVERLAY != 0, kTokensPerTile, HELD>;
static_assert(SHARED_BYTES == Places::kBytes, "as the launch says");
#endif

constexpr int kWidth = K_BLOCKS * 32, kInner = TILE_COUNT * 8;

namespace {

// ``bias_row``: the gate's, in front of the up row's by 8.
__device__ __forceinline__ uint16_t activated(float gate_sum, float up_sum,
                                              const uint16_t* bias_row) {
  if (HAS_BIAS) {
    gate_sum += bf16_to_float(load_early_bf16(bias_row));
    up_sum += bf16_to_float(load_early_bf16(bias_row + 8));
  }
  const float gate = bf16_to_float(float_to_bf16(gate_sum));
  const float up = bf16_to_float(float_to_bf16(up_sum));
  const float silu = bf16_to_float(float_to_bf16(gate / (1.0f + expf(-gate))));
  return float_to_bf16(silu * up);
}

#if MANY_TOKENS

// The outputs as GroupSums::emit_all() takes them.
struct Outputs {
  struct Held {
    uint16_t* place;
    const uint16_t* bias_row;
  };
  const uint16_t* bias;
  uint16_t* h;

  __device__ __forceinline__ Held begin(int tile, int g, int token) const {
    return {h + static_cast<int64_t>(token) * kInner + tile * kPairsPerTile + g,
            bias + tile * 16 + g};
  }
  __device__ __forceinline__ void more(const Held&) const {}
  __device__ __forceinline__ void end(const Held& held, float gate, float up) const {
    *held.place = activated(gate, up, held.bias_row);
  }
};

#endif

}  // namespace

#if MANY_TOKENS

extern "C" __global__ void __launch_bounds__(Many::kThreads, 1)
    rms_swiglu_of_many(const Units::Stored* gate_up, const uint16_t* bias, uint16_t* h,
                       const unsigned char* workspace_tokens, float* workspace_sums,
                       unsigned* workspace_arrived, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  project_many(nullptr, gate_up, workspace_tokens, workspace_sums, workspace_arrived, rows, shared,
               Outputs{bias, h}, [](const Many&) {});
}

#else

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    rms_swiglu(const uint16_t* x, const uint16_t* norm, const Units::Stored* gate_up,
               const uint16_t* bias, uint16_t* h, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  pdl_launch_dependents();
  const Chunks chunks{share_of_pairs<TILE_COUNT * 8, UNIT_PAIRS, CTAS>(blockIdx.x)};
  Stream stream(gate_up, chunks, shared + Places::kRing, slice_of_warp<Shape>());
  stream.start();
  Places::Fragments::fetch_norm(shared + Places::kNorm, norm);
  cp_async_commit();

  const int first_token = blockIdx.y * Shape::kMostTokens;
  const int tokens = min(Shape::kMostTokens, rows - first_token);
  const Elements elements(tokens);
  float* partials = reinterpret_cast<float*>(shared + Places::kPartials);
  const auto emit = [&](int first_tile, const Element& e, float gate, float up) {
    const int tile = first_tile + e.tile, pair = tile * kPairsPerTile + e.g;
    if (!chunks.holds(pair)) return;
    h[static_cast<int64_t>(first_token + e.token) * kInner + pair] =
        activated(gate, up, bias + tile * 16 + e.g);
  };
  pdl_wait();
  stream_tokens<Places, true, true, NormRounding::kCastFirst>(
      stream, shared, x + static_cast<int64_t>(first_token) * kWidth, tokens,
      static_cast<float>(EPS), [] {},
      [&](int chunk, const Stream::Sums& sums) {
#if HELD > 1
        add_held_slices<Shape, HELD>(partials, sums, elements, chunk, chunk == chunks.count() - 1,
                                     [&](int, const Element& e, float gate, float up) {
                                       emit(chunks.first_tile(0), e, gate, up);
                                     });
#else
        add_slices<Shape, Places::kPartialStride, ONE_CHUNK == 0>(
            partials, sums, elements, [&](int, const Element& e, float gate, float up) {
              emit(chunks.first_tile(chunk), e, gate, up);
            });
#endif
      });
}

#endif
