// LinearPartial for many tokens: CTAs split K too. For x, weight and partial see kernel.cu.
//
//   workspace_tokens … workspace_arrived  see linear/many_tokens.cu
//
// The grid is that of linear/many_tokens.cu.
#include "../_device/dense_many.cuh"

CONFIG

using Dense = DenseMany<Config>;

constexpr int kOutputs = Config::kTileCount * 16;

namespace {

// The outputs for GroupSums::emit_all().
struct Outputs {
  using Held = float*;
  float* partial;

  __device__ __forceinline__ Held begin(int tile, int g, int token) const {
    return partial + static_cast<int64_t>(token) * kOutputs + tile * 16 + g;
  }
  __device__ __forceinline__ void more(Held&) const {}
  __device__ __forceinline__ void end(const Held& held, float low, float high) const {
    held[0] = low;
    held[8] = high;
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(Dense::Many::kThreads, 1)
    linear_partial_of_many(const uint16_t* x, const Dense::Units::Stored* weight, float* partial,
                           const unsigned char* workspace_tokens, float* workspace_sums,
                           unsigned* workspace_arrived, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  project_many<Config>(x, weight, workspace_tokens, workspace_sums, workspace_arrived, rows, shared,
                       Outputs{partial}, [](const Dense::Many&) {});
}
