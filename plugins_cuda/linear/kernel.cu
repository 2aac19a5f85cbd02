// Linear: y = SCALE · (x · Wᵀ (+ bias)) (+ residual) for up to 256 rows.
//
//   x         [rows, 32·K_BLOCKS] bf16, in
//   weight    [TILE_COUNT, K_BLOCKS, 512] bf16, in, constant (linear/packing.py); or the format
//             WEIGHTS (linear/block_scaled.py)
//   bias      [16·TILE_COUNT] bf16, in, constant; null without HAS_BIAS
//   residual  [rows, 16·TILE_COUNT] bf16, in; null without HAS_RESIDUAL
//   y         [rows, 16·TILE_COUNT] bf16, out
//
// Grid (CTAs over rows of the weight, groups of 8·TOKEN_TILES tokens). Each byte of the weight is
// read once per group of tokens: O of GPT-OSS has 23.6 MB, 5.2 µs at 4.53 TB/s. With more tokens,
// CTAs also split K (many_tokens.cu).
#include "../_device/dense_few.cuh"
#include "device/addends.cuh"
#include "device/config.cuh"

using Dense = DenseFew<Config, Config::kFragments != 0, false>;
using Units = Dense::Units;
using Shape = Dense::Shape;
using Places = Dense::Places;

constexpr int kWidth = Config::kKBlocks * 32, kOutputs = Config::kTileCount * 16;

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32, 1)
    linear(const uint16_t* x, const Units::Stored* weight, const uint16_t* bias,
           const uint16_t* residual, uint16_t* y, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  pdl_launch_dependents();
  const auto chunks = Dense::chunks();
  Dense::Stream stream(weight, chunks, shared + Places::kRing, slice_of_warp<Shape>());
  stream.start();

  const int first_token = blockIdx.y * Shape::kMaxTokens;
  const int tokens = min(Shape::kMaxTokens, rows - first_token);
  const auto output_of = [&](const Element& e, int chunk) {
    const int64_t token = first_token + e.token;
    return token * kOutputs + (chunks.first_tile(chunk) + e.tile) * 16 + e.g;
  };
  const auto is_owned = [&](const Element& e, int chunk) {
    return chunks.holds((chunks.first_tile(chunk) + e.tile) * kPairsPerTile + e.g);
  };

  // The addends of a thread's first output are loaded while the weights stream.
  const Elements elements(tokens);
  const Element own = elements.at(threadIdx.x);
  const bool ahead = own.tile < Config::kTiles && elements.holds(own) && is_owned(own, 0);
  Addends early;
  if (ahead) early.load_bias(bias + output_of(own, 0) % kOutputs);
  pdl_wait();
  if (ahead) early.load_residual(residual + output_of(own, 0));

  float* partials = reinterpret_cast<float*>(shared + Places::kPartials);
  stream_tokens<Places, Config::kFragments != 0, false, NormRounding::kCastFirst>(
      stream, shared, x + static_cast<int64_t>(first_token) * kWidth, tokens, 0.0f, [] {},
      [&](int chunk, const Dense::Stream::Sums& sums) {
        add_slices<Shape, Places::kPartialStride, Config::kOneChunk == 0>(
            partials, sums, elements, [&](int index, const Element& e, float low, float high) {
              if (!is_owned(e, chunk)) return;
              const int64_t output = output_of(e, chunk);
              Addends addends = early;
              if (!Dense::kAllEarly && (chunk > 0 || index >= Shape::kThreads)) {
                addends.load_bias(bias + output % kOutputs);
                addends.load_residual(residual + output);
              }
              y[output] = addends.apply(low, 0);
              y[output + 8] = addends.apply(high, 1);
            });
      });
}
