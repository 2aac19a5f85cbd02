// RmsSwiglu for many tokens: CTAs split K too.
//
//   x, gate_up, bias, h  see kernel.cu
//   workspace_tokens   with TOKENS_READY: tokens (linear/normed_tokens.cu or token_panels.cu)
//   workspace_sums     [groups of tokens][SLICES / GROUP_SLICES][TILE_COUNT][TOKEN_TILES][128] fp32
//   workspace_arrived  [groups of tokens, CTAS] uint32, zeros before and after
//
// Grid (CTAs over tiles and groups of K slices, groups of 8·TOKEN_TILES tokens):
// _device/many_tokens.cuh, or with PANELS _device/many_panels.cuh.
#include "../_device/dense_many.cuh"
#include "device/activated.cuh"
#include "device/config.cuh"

using Dense = DenseMany<Config>;

constexpr int kInner = Config::kTileCount * 8;

namespace {

// The outputs for GroupSums::emit_all().
struct Outputs {
  struct Held {
    uint16_t* place;
    const uint16_t* bias_row;
  };
  const uint16_t* bias;
  uint16_t* h;

  __device__ __forceinline__ Held begin(int tile, int g, int token) const {
    return {h + static_cast<int64_t>(token) * kInner + tile * kPairsPerTile + g,
            bias + tile * 16 + g};
  }
  __device__ __forceinline__ void more(const Held&) const {}
  __device__ __forceinline__ void end(const Held& held, float gate, float up) const {
    *held.place = activated(gate, up, held.bias_row);
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(Dense::Many::kThreads, 1)
    rms_swiglu_of_many(const uint16_t* x, const Dense::Units::Stored* gate_up, const uint16_t* bias,
                       uint16_t* h, const unsigned char* workspace_tokens, float* workspace_sums,
                       unsigned* workspace_arrived, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  project_many<Config>(x, gate_up, workspace_tokens, workspace_sums, workspace_arrived, rows,
                       shared, Outputs{bias, h}, [](const Dense::Many&) {});
}
