// LinearPartial: x · Wᵀ for up to 256 rows, with unrounded fp32 sums.
//
//   x        [rows, 32·K_BLOCKS] bf16, in
//   weight   [TILE_COUNT, K_BLOCKS, 512] bf16, in, constant (linear/packing.py); or the format
//            WEIGHTS (linear/block_scaled.py)
//   partial  [rows, 16·TILE_COUNT] fp32, out
//
// Grid and bytes are those of linear/kernel.cu.
#include "../_device/dense_few.cuh"

CONFIG

using Dense = DenseFew<Config, Config::kFragments != 0, false>;
using Units = Dense::Units;
using Shape = Dense::Shape;
using Places = Dense::Places;

constexpr int kWidth = Config::kKBlocks * 32, kOutputs = Config::kTileCount * 16;

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32, 1)
    linear_partial(const uint16_t* x, const Units::Stored* weight, float* partial, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  pdl_launch_dependents();
  const auto chunks = Dense::chunks();
  Dense::Stream stream(weight, chunks, shared + Places::kRing, slice_of_warp<Shape>());
  stream.start();
  const int first_token = blockIdx.y * Shape::kMaxTokens;
  const int tokens = min(Shape::kMaxTokens, rows - first_token);
  const Elements elements(tokens);
  pdl_wait();
  float* slices = reinterpret_cast<float*>(shared + Places::kPartials);
  stream_tokens<Places, Config::kFragments != 0, false, NormRounding::kCastFirst>(
      stream, shared, x + static_cast<int64_t>(first_token) * kWidth, tokens, 0.0f, [] {},
      [&](int chunk, const Dense::Stream::Sums& sums) {
        add_slices<Shape, Places::kPartialStride, Config::kOneChunk == 0>(
            slices, sums, elements, [&](int, const Element& e, float low, float high) {
              const int tile = chunks.first_tile(chunk) + e.tile;
              if (!chunks.holds(tile * kPairsPerTile + e.g)) return;
              const int64_t token = first_token + e.token;
              float* const output = partial + token * kOutputs + tile * 16 + e.g;
              output[0] = low;
              output[8] = high;
            });
      });
}
