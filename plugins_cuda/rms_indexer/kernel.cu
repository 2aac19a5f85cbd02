// RmsIndexer: q = rms(x) · W_q, head weights = rms(x) · W_h; k = rms(x) · W_k, to its cache slot.
//
//   x             [rows, 32·K_BLOCKS] bf16, in
//   norm          [32·K_BLOCKS] bf16, in, constant; null without HAS_NORM
//   weight        [TILE_COUNT, K_BLOCKS, 512] bf16, in, constant (rms_indexer/packing.py)
//   write_slot    [rows] int32, in: page · page size + offset
//   key_pool      [pages, 1, page size, WIDTH] bf16, out at the slots
//   q             [rows, HEADS, WIDTH] bf16, out
//   head_weights  [rows, HEADS] bf16, out; ones if the weight has no rows for them
//
// The grid and the order of sums are those of RmsQkvRope. With four heads of 256, GPT-OSS reads 7.5
// MB, 1.7 µs at 4.53 TB/s.
#include "../_device/dense_few.cuh"
#include "device/config.cuh"
#include "device/tensors.cuh"

using Dense = DenseFew<Config, Config::kFragments != 0, Config::kHasNorm != 0>;
using Units = Dense::Units;
using Shape = Dense::Shape;
using Places = Dense::Places;

constexpr int kWidth = Config::kKBlocks * 32;

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32, 1)
    rms_indexer(const uint16_t* x, const uint16_t* norm, const Units::Stored* weight,
                const int* write_slot, KeyElement* key_pool, uint16_t* q, uint16_t* head_weights,
                int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  pdl_launch_dependents();
  const auto chunks = Dense::chunks();
  Dense::Stream stream(weight, chunks, shared + Places::kRing, slice_of_warp<Shape>());
  stream.start();
  if (Config::kHasNorm) {
    Places::Fragments::fetch_norm(shared + Places::kNorm, norm);
    cp_async_commit();
  }

  const int first_token = blockIdx.y * Shape::kMaxTokens;
  const int tokens = min(Shape::kMaxTokens, rows - first_token);
  const Tensors tensors{write_slot, key_pool, q, head_weights};
  const Elements elements(tokens);
  float* partials = reinterpret_cast<float*>(shared + Places::kPartials);

  pdl_wait();
  tensors.weigh_evenly(tokens, first_token);
  stream_tokens<Places, Config::kFragments != 0, Config::kHasNorm != 0,
                NormRounding::kWeightInFp32>(
      stream, shared, x + static_cast<int64_t>(first_token) * kWidth, tokens,
      static_cast<float>(Config::kEps), [] {},
      [&](int chunk, const Dense::Stream::Sums& sums) {
        add_slices<Shape, Places::kPartialStride, Config::kOneChunk == 0>(
            partials, sums, elements, [&](int, const Element& e, float low, float high) {
              const int tile = chunks.first_tile(chunk) + e.tile;
              if (!chunks.holds(tile * kPairsPerTile + e.g)) return;
              const int token = first_token + e.token;
              tensors.store(tile, e.g, token, tensors.slot_of(tile, token), low, high);
            });
      });
}
