// RmsIndexer for many tokens: CTAs split K too.
//
//   x … head_weights   see kernel.cu
//   workspace_tokens, workspace_sums, workspace_arrived   see rms_qkv_rope/many_tokens.cu
//
// The grid and the order of sums are those of RmsQkvRope.
#include "../_device/dense_many.cuh"
#include "device/config.cuh"
#include "device/tensors.cuh"

using Dense = DenseMany<Config>;

namespace {

// The outputs for GroupSums::emit_all().
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

}  // namespace

extern "C" __global__ void __launch_bounds__(Dense::Many::kThreads, 1)
    rms_indexer_of_many(const uint16_t* x, const Dense::Units::Stored* weight,
                        const int* write_slot, KeyElement* key_pool, uint16_t* q,
                        uint16_t* head_weights, const unsigned char* workspace_tokens,
                        float* workspace_sums, unsigned* workspace_arrived, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  const Tensors tensors{write_slot, key_pool, q, head_weights};
  project_many<Config>(x, weight, workspace_tokens, workspace_sums, workspace_arrived, rows, shared,
                       Outputs{tensors}, [&](const Dense::Many& many) {
                         tensors.weigh_evenly(many.tokens, many.first_token);
                       });
}
