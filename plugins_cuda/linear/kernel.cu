// Linear: y = x · Wᵀ (+ bias) (+ residual) for up to 256 rows.
//
//   x         [rows, 32·K_BLOCKS] bf16, in
//   weight    [TILE_COUNT, K_BLOCKS, 512] bf16, in, constant (linear/packing.py); or stored as
//             WEIGHTS says (linear/block_scaled.py)
//   bias      [16·TILE_COUNT] bf16, in, constant; null without HAS_BIAS
//   residual  [rows, 16·TILE_COUNT] bf16, in; null without HAS_RESIDUAL
//   y         [rows, 16·TILE_COUNT] bf16, out
//   workspace_tokens   with TOKENS_READY: x as linear/token_panels.cu describes it
//   workspace_sums     [groups of tokens][SLICES / GROUP_SLICES][TILE_COUNT][TOKEN_TILES][128] fp32
//   workspace_arrived  [groups of tokens, CTAS] uint32, zeros before and after
//
// Grid (CTAs over rows of the weight, groups of 8·TOKEN_TILES tokens). Each byte of the weight is
// read once for a group of tokens: O of GPT-OSS is 23.6 MB, 5.2 µs at 4.53 TB/s. With MANY_TOKENS
// the CTAs also split K (_device/many_tokens.cuh, with PANELS _device/many_panels.cuh).
#include "../_device/dense_kernel.cuh"

#if !MANY_TOKENS
using Places = DensePlaces<Shape, FRAGMENTS != 0, false, OVERLAY != 0, TOKEN_ROWS>;
static_assert(SHARED_BYTES == Places::kBytes, "as the launch says");
#endif

constexpr int kWidth = K_BLOCKS * 32, kOutputs = TILE_COUNT * 16;

namespace {

// What the epilogue adds to the two outputs of a pair.
struct Addends {
  float bias[2], residual[2];

  __device__ __forceinline__ void load_bias(const uint16_t* bias_row) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bias[half] = HAS_BIAS ? bf16_to_float(load_early_bf16(bias_row + 8 * half)) : 0.0f;
    }
  }
  __device__ __forceinline__ void load_residual(const uint16_t* residual_row) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      residual[half] = HAS_RESIDUAL ? bf16_to_float(load_l2_bf16(residual_row + 8 * half)) : 0.0f;
    }
  }
  __device__ __forceinline__ uint16_t apply(float sum, int half) const {
    const uint16_t projected = float_to_bf16(sum + bias[half]);
    return HAS_RESIDUAL ? float_to_bf16(residual[half] + bf16_to_float(projected)) : projected;
  }
};

#if MANY_TOKENS

// The outputs as GroupSums::emit_all() takes them.
struct Outputs {
  struct Held {
    int64_t output;
    Addends addends;
  };
  const uint16_t* bias;
  const uint16_t* residual;
  uint16_t* y;

  __device__ __forceinline__ Held begin(int tile, int g, int token) const {
    const int row = tile * 16 + g;
    Held held;
    held.output = static_cast<int64_t>(token) * kOutputs + row;
    held.addends.load_bias(bias + row);
    held.addends.load_residual(residual + held.output);
    return held;
  }
  __device__ __forceinline__ void more(Held&) const {}
  __device__ __forceinline__ void end(const Held& held, float low, float high) const {
    y[held.output] = held.addends.apply(low, 0);
    y[held.output + 8] = held.addends.apply(high, 1);
  }
};

#endif

}  // namespace

#if MANY_TOKENS

extern "C" __global__ void __launch_bounds__(Many::kThreads, 1)
    linear_of_many(const uint16_t* x, const Units::Stored* weight, const uint16_t* bias,
                   const uint16_t* residual, uint16_t* y, const unsigned char* workspace_tokens,
                   float* workspace_sums, unsigned* workspace_arrived, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  project_many(x, weight, workspace_tokens, workspace_sums, workspace_arrived, rows, shared,
               Outputs{bias, residual, y}, [](const Many&) {});
}

#else

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    linear(const uint16_t* x, const Units::Stored* weight, const uint16_t* bias,
           const uint16_t* residual, uint16_t* y, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  pdl_launch_dependents();
  const Chunks chunks{share_of_pairs<TILE_COUNT * 8, UNIT_PAIRS, CTAS>(blockIdx.x)};
  Stream stream(weight, chunks, shared + Places::kRing, slice_of_warp<Shape>());
  stream.start();

  const int first_token = blockIdx.y * Shape::kMostTokens;
  const int tokens = min(Shape::kMostTokens, rows - first_token);
  const auto output_of = [&](const Element& e, int chunk) {
    const int64_t token = first_token + e.token;
    return token * kOutputs + (chunks.first_tile(chunk) + e.tile) * 16 + e.g;
  };
  const auto is_owned = [&](const Element& e, int chunk) {
    return chunks.holds((chunks.first_tile(chunk) + e.tile) * kPairsPerTile + e.g);
  };

  // What a thread adds to its first output is under way while the weights stream.
  const Elements elements(tokens);
  const Element own = elements.at(threadIdx.x);
  const bool ahead = own.tile < TILES && elements.holds(own) && is_owned(own, 0);
  Addends early;
  if (ahead) early.load_bias(bias + output_of(own, 0) % kOutputs);
  pdl_wait();
  if (ahead) early.load_residual(residual + output_of(own, 0));

  float* partials = reinterpret_cast<float*>(shared + Places::kPartials);
  stream_tokens<Places, FRAGMENTS != 0, false, NormRounding::kCastFirst>(
      stream, shared, x + static_cast<int64_t>(first_token) * kWidth, tokens, 0.0f, [] {},
      [&](int chunk, const Stream::Sums& sums) {
        add_slices<Shape, Places::kPartialStride, ONE_CHUNK == 0>(
            partials, sums, elements, [&](int index, const Element& e, float low, float high) {
              if (!is_owned(e, chunk)) return;
              const int64_t output = output_of(e, chunk);
              Addends addends = early;
              if (!kAllEarly && (chunk > 0 || index >= Shape::kThreads)) {
                addends.load_bias(bias + output % kOutputs);
                addends.load_residual(residual + output);
              }
              y[output] = addends.apply(low, 0);
              y[output + 8] = addends.apply(high, 1);
            });
      });
}

#endif
