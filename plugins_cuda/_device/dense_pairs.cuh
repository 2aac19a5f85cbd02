// A dense kernel whose outputs are pairs, rows g and g + 8 of a tile for one token, that want a
// bias and what lies at the token's place.
//
// Pair is the kernel's: Pair(tile, g, token), then, in the order in which it can be known,
// load_bias(its first row's), load_place(tensors), load_tables(tensors); store(tensors, low, high).
// Without MANY_TOKENS a thread fetches what its first pair needs beside the weights, and every CTA
// norms the tokens for itself.
#pragma once

#include "dense_kernel.cuh"

constexpr int kWidth = K_BLOCKS * 32;

#if MANY_TOKENS

// The outputs as GroupSums::emit_all() takes them.
template <class Pair, class Tensors>
struct PairOutputs {
  const Tensors& tensors;
  const uint16_t* bias;

  __device__ __forceinline__ Pair begin(int tile, int g, int token) const {
    Pair pair(tile, g, token);
    pair.load_bias(bias + tile * 16 + g);
    pair.load_place(tensors);
    return pair;
  }
  __device__ __forceinline__ void more(Pair& pair) const {
    pair.load_tables(tensors);
  }
  __device__ __forceinline__ void end(const Pair& pair, float low, float high) const {
    pair.store(tensors, low, high);
  }
};

template <class Pair, class Tensors>
__device__ __forceinline__ void project_pairs(const Tensors& tensors, const uint16_t* x,
                                              const Units::Stored* weight, const uint16_t* bias,
                                              const unsigned char* workspace_tokens,
                                              float* workspace_sums, unsigned* workspace_arrived,
                                              int rows, unsigned char* shared) {
  project_many<true>(x, weight, workspace_tokens, workspace_sums, workspace_arrived, rows, shared,
                     PairOutputs<Pair, Tensors>{tensors, bias}, [](const Many&) {});
}

#else

using Places = DensePlaces<Shape, FRAGMENTS != 0, HAS_NORM != 0, OVERLAY != 0, TOKEN_ROWS>;
static_assert(SHARED_BYTES == Places::kBytes, "as the launch says");

template <class Pair, class Tensors>
__device__ __forceinline__ void project_pairs(const Tensors& tensors, const uint16_t* x,
                                              const uint16_t* norm, const Units::Stored* weight,
                                              const uint16_t* bias, int rows,
                                              unsigned char* shared) {
  const Chunks chunks{share_of_pairs<TILE_COUNT * 8, UNIT_PAIRS, CTAS>(blockIdx.x)};
  Stream stream(weight, chunks, shared + Places::kRing, slice_of_warp<Shape>());
  stream.start();
  if (HAS_NORM) {
    Places::Fragments::fetch_norm(shared + Places::kNorm, norm);
    cp_async_commit();
  }

  const int first_token = blockIdx.y * Shape::kMostTokens;
  const int tokens = min(Shape::kMostTokens, rows - first_token);
  const Elements elements(tokens);
  const Element own = elements.at(threadIdx.x);
  const int own_tile = chunks.first_tile(0) + own.tile;
  const bool ahead =
      own.tile < TILES && elements.holds(own) && chunks.holds(own_tile * kPairsPerTile + own.g);
  Pair early(own_tile, own.g, first_token + own.token);
  if (ahead) early.load_bias(bias + own_tile * 16 + own.g);
  float* partials = reinterpret_cast<float*>(shared + Places::kPartials);

  pdl_wait();
  // The launch behind reads early what was there before (launches.py).
  pdl_launch_dependents();
  if (ahead) early.load_place(tensors);
  constexpr NormRounding kRounding =
      CAST_FIRST ? NormRounding::kCastFirst : NormRounding::kWeightInFp32;
  stream_tokens<Places, FRAGMENTS != 0, HAS_NORM != 0, kRounding>(
      stream, shared, x + static_cast<int64_t>(first_token) * kWidth, tokens,
      static_cast<float>(EPS),
      [&] {
        if (ahead) early.load_tables(tensors);
      },
      [&](int chunk, const Stream::Sums& sums) {
        add_slices<Shape, Places::kPartialStride, ONE_CHUNK == 0>(
            partials, sums, elements, [&](int index, const Element& e, float low, float high) {
              const int tile = chunks.first_tile(chunk) + e.tile;
              if (!chunks.holds(tile * kPairsPerTile + e.g)) return;
              Pair pair = early;
              if (!kAllEarly && (chunk > 0 || index >= Shape::kThreads)) {
                pair = Pair(tile, e.g, first_token + e.token);
                pair.load_bias(bias + tile * 16 + e.g);
                pair.load_place(tensors);
                pair.load_tables(tensors);
              }
              pair.store(tensors, low, high);
            });
      });
}

#endif
