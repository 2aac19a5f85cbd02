// LinearPartial of more than a few tokens: CTAs split K, too; x, weight and partial as kernel.cu's.
//
//   workspace_tokens … workspace_arrived  as linear/many_tokens.cu's
//
// Grid: as linear/many_tokens.cu's.
#include "../_device/dense_many.cuh"

CONFIG

using Dense = DenseMany<Config>;

constexpr int kOutputs = Config::kTileCount * 16;

namespace {

// The outputs as GroupSums::emit_all() takes them.
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
