// RmsSwiglu: h = silu(n · Gᵀ) · (n · Uᵀ) with n = rms(x), or n = x without HAS_NORM. Gate and up
// may have biases, and GELU may replace SiLU (ACTIVATION).
//
//   x        [rows, 32·K_BLOCKS] bf16, in
//   norm     [32·K_BLOCKS] bf16, in, constant; null without HAS_NORM
//   gate_up  [TILE_COUNT, K_BLOCKS, 512] bf16, in, constant (rms_swiglu/packing.py); or the format
//            WEIGHTS (linear/block_scaled.py)
//   bias     [16·TILE_COUNT] bf16, in, constant, in packed order; null without HAS_BIAS
//   h        [rows, 8·TILE_COUNT] bf16, out
//
// Grid (CTAs over tiles, groups of 8·TOKEN_TILES tokens). Row g of a tile is a gate row, row g + 8
// the matching up row. A GPT-OSS draft has 199 MB, 44 µs at 4.53 TB/s. Its 2160 tiles over 132 CTAs
// are 17 at most and 16.4 on average: 96 %. With more tokens, another launch normalizes
// (many_tokens.cu).
#include "../_device/dense_few.cuh"
#include "device/activated.cuh"
#include "device/config.cuh"

constexpr bool kFragments = Config::kFragments != 0, kHasNorm = Config::kHasNorm != 0;
using Dense = DenseFew<Config, kFragments, kHasNorm>;
using Units = Dense::Units;
using Shape = Dense::Shape;
using Places = Dense::Places;

constexpr int kWidth = Config::kKBlocks * 32, kInner = Config::kTileCount * 8;

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32, Dense::kResident)
    rms_swiglu(const uint16_t* x, const uint16_t* norm, const Units::Stored* gate_up,
               const uint16_t* bias, uint16_t* h, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  pdl_launch_dependents();
  const auto chunks = Dense::chunks();
  Dense::Stream stream(gate_up, chunks, shared + Places::kRing, slice_of_warp<Shape>());
  stream.start();
  if (kHasNorm) {
    Places::Fragments::fetch_norm(shared + Places::kNorm, norm);
    cp_async_commit();
  }

  const int first_token = blockIdx.y * Shape::kMaxTokens;
  const int tokens = min(Shape::kMaxTokens, rows - first_token);
  const Elements elements(tokens);
  float* partials = reinterpret_cast<float*>(shared + Places::kPartials);
  const auto emit = [&](int first_tile, const Element& e, float gate, float up) {
    const int tile = first_tile + e.tile, pair = tile * kPairsPerTile + e.g;
    if (!chunks.holds(pair)) return;
    h[static_cast<int64_t>(first_token + e.token) * kInner + pair] =
        activated(gate, up, bias + tile * 16 + e.g);
  };
  pdl_wait();
  stream_tokens<Places, kFragments, kHasNorm, static_cast<NormRounding>(Config::kNormRounding)>(
      stream, shared, x + static_cast<int64_t>(first_token) * kWidth, tokens,
      static_cast<float>(Config::kEps), [] {},
      [&](int chunk, const Dense::Stream::Sums& sums) {
        if constexpr (Config::kHeld > 1) {
          add_held_slices<Shape, Config::kHeld>(partials, sums, elements, chunk,
                                                chunk == chunks.count() - 1,
                                                [&](int, const Element& e, float gate, float up) {
                                                  emit(chunks.first_tile(0), e, gate, up);
                                                });
        } else {
          add_slices<Shape, Places::kPartialStride, Config::kOneChunk == 0>(
              partials, sums, elements, [&](int, const Element& e, float gate, float up) {
                emit(chunks.first_tile(chunk), e, gate, up);
              });
        }
      });
}
