// Linear for many tokens: y = SCALE · (x · Wᵀ (+ bias)) (+ residual); CTAs split K too.
//
//   x … y              see kernel.cu
//   workspace_tokens   with TOKENS_READY: x in panels (token_panels.cu)
//   workspace_sums     [groups of tokens][SLICES / GROUP_SLICES][TILE_COUNT][TOKEN_TILES][128] fp32
//   workspace_arrived  [groups of tokens, CTAS] uint32, zeros before and after
//
// Grid (CTAs over rows of the weight and groups of K slices, groups of 8·TOKEN_TILES tokens):
// _device/many_tokens.cuh, or with PANELS _device/many_panels.cuh.
#include "../_device/dense_many.cuh"
#include "device/addends.cuh"
#include "device/config.cuh"

using Dense = DenseMany<Config>;

constexpr int kOutputs = Config::kTileCount * 16;

namespace {

// The outputs for GroupSums::emit_all().
struct Outputs {
  struct Held {
    int64_t output;
    Addends addends;
  };
  const uint16_t* bias;
  const uint16_t* residual;
  uint16_t* y;

  __device__ __forceinline__ Held begin(int tile, int g, int token) const {
    const int row = tile * 16 + g;
    Held held;
    held.output = static_cast<int64_t>(token) * kOutputs + row;
    held.addends.load_bias(bias + row);
    held.addends.load_residual(residual + held.output);
    return held;
  }
  __device__ __forceinline__ void more(Held&) const {}
  __device__ __forceinline__ void end(const Held& held, float low, float high) const {
    y[held.output] = held.addends.apply(low, 0);
    y[held.output + 8] = held.addends.apply(high, 1);
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(Dense::Many::kThreads, 1)
    linear_of_many(const uint16_t* x, const Dense::Units::Stored* weight, const uint16_t* bias,
                   const uint16_t* residual, uint16_t* y, const unsigned char* workspace_tokens,
                   float* workspace_sums, unsigned* workspace_arrived, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  project_many<Config>(x, weight, workspace_tokens, workspace_sums, workspace_arrived, rows, shared,
                       Outputs{bias, residual, y}, [](const Dense::Many&) {});
}
