// A dense kernel for many tokens with the pair epilogue of dense_few_pairs.cuh.
#pragma once

#include "dense_many.cuh"

// The outputs for GroupSums::emit_all().
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

template <class C, class Pair, class Tensors>
__device__ __forceinline__ void project_many_pairs(
    const Tensors& tensors, const uint16_t* x, const typename DenseMany<C>::Units::Stored* weight,
    const uint16_t* bias, const unsigned char* workspace_tokens, float* workspace_sums,
    unsigned* workspace_arrived, int rows, unsigned char* shared) {
  project_many<C, true>(x, weight, workspace_tokens, workspace_sums, workspace_arrived, rows,
                        shared, PairOutputs<Pair, Tensors>{tensors, bias}, [](const auto&) {});
}
