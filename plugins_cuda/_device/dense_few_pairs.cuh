// A dense kernel for few tokens whose outputs are pairs: rows g and g + 8 of a tile for one token.
// The epilogue of a pair needs a bias and data at the token's position.
//
// Pair is a type of the kernel: Pair(tile, g, token), then load_bias(bias of its first row),
// load_place(tensors) and load_tables(tensors), then store(tensors, low, high). A thread loads the
// data of its first pair while the weights arrive. Every CTA normalizes the tokens itself.
#pragma once

#include "dense_few.cuh"

// C: the members that DenseFew needs; kFragments, kHasNorm, kNormRounding, kEps.
template <class C>
using PairsOfFew = DenseFew<C, C::kFragments != 0, C::kHasNorm != 0>;

template <class C, class Pair, class Tensors>
__device__ __forceinline__ void project_pairs(const Tensors& tensors, const uint16_t* x,
                                              const uint16_t* norm,
                                              const typename PairsOfFew<C>::Units::Stored* weight,
                                              const uint16_t* bias, int rows,
                                              unsigned char* shared) {
  using Dense = PairsOfFew<C>;
  using Shape = typename Dense::Shape;
  using Places = typename Dense::Places;
  const auto chunks = Dense::chunks();
  typename Dense::Stream stream(weight, chunks, shared + Places::kRing, slice_of_warp<Shape>());
  stream.start();
  if (C::kHasNorm) {
    Places::Fragments::fetch_norm(shared + Places::kNorm, norm);
    cp_async_commit();
  }

  const int first_token = blockIdx.y * Shape::kMaxTokens;
  const int tokens = min(Shape::kMaxTokens, rows - first_token);
  const Elements elements(tokens);
  const Element own = elements.at(threadIdx.x);
  const int own_tile = chunks.first_tile(0) + own.tile;
  const bool ahead =
      own.tile < C::kTiles && elements.holds(own) && chunks.holds(own_tile * kPairsPerTile + own.g);
  Pair early(own_tile, own.g, first_token + own.token);
  if (ahead) early.load_bias(bias + own_tile * 16 + own.g);
  float* partials = reinterpret_cast<float*>(shared + Places::kPartials);

  pdl_wait();
  // The next launch reads older data early (launches.py), so it may start only now.
  pdl_launch_dependents();
  if (ahead) early.load_place(tensors);
  constexpr NormRounding kRounding = static_cast<NormRounding>(C::kNormRounding);
  stream_tokens<Places, C::kFragments != 0, C::kHasNorm != 0, kRounding>(
      stream, shared, x + static_cast<int64_t>(first_token) * (C::kKBlocks * 32), tokens, C::kEps,
      [&] {
        if (ahead) early.load_tables(tensors);
      },
      [&](int chunk, const typename Dense::Stream::Sums& sums) {
        add_slices<Shape, Places::kPartialStride, C::kOneChunk == 0>(
            partials, sums, elements, [&](int index, const Element& e, float low, float high) {
              const int tile = chunks.first_tile(chunk) + e.tile;
              if (!chunks.holds(tile * kPairsPerTile + e.g)) return;
              Pair pair = early;
              if (!Dense::kAllEarly && (chunk > 0 || index >= Shape::kThreads)) {
                pair = Pair(tile, e.g, first_token + e.token);
                pair.load_bias(bias + tile * 16 + e.g);
                pair.load_place(tensors);
                pair.load_tables(tensors);
              }
              pair.store(tensors, low, high);
            });
      });
}
