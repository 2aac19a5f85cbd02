// SigmoidGate: y = x · σ(gate), with GELU y = x · gelu(gate); the factor is rounded to bf16.
//
//   x     bf16 [T, COLUMNS], in: of which WIDTH from COLUMN on are read
//   gate  bf16 [T, GATES], in; with PER_ROW the first one applies to the complete row
//   y     bf16 [T, WIDTH], out
//
// Grid: one thread per 8 values. 4 rows of 24 heads of 256 move 49 KB each way, all in L2.
#include "../_device/bf16.cuh"
#include "../_device/ptx.cuh"
#include "../_device/ptx_load.cuh"

CONFIG

namespace {

constexpr int kVectors = Config::kWidth / 8;

// GELU by tanh is x·σ(2√(2/π)·(x + 0.044715·x³)).
__device__ __forceinline__ float activated(float x) {
  const float z = Config::kGelu != 0 ? 1.59576912f * (x + 0.044715f * x * x * x) : x;
  const float factor = (Config::kGelu != 0 ? x : 1.0f) / (1.0f + expf(-z));
  return bf16_to_float(float_to_bf16(factor));
}

__device__ __forceinline__ uint32_t gated(uint32_t x, uint32_t gate) {
  const float2 value = unpack_bf16x2(x), by = unpack_bf16x2(gate);
  return pack_bf16x2(value.x * activated(by.x), value.y * activated(by.y));
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    sigmoid_gate(const uint16_t* x, const uint16_t* gate, uint16_t* y, int vectors) {
  pdl_launch_dependents();
  pdl_wait();
  const int i = blockIdx.x * Config::kThreads + threadIdx.x;
  if (i >= vectors) return;
  int64_t place = static_cast<int64_t>(i) * 8;
  if (Config::kColumns != Config::kWidth) {
    place =
        static_cast<int64_t>(i / kVectors) * Config::kColumns + Config::kColumn + i % kVectors * 8;
  }
  const uint4 value = load_l2_16(x + place);
  uint4 by;
  if (Config::kPerRow != 0) {
    const uint32_t one = load_l2_bf16(gate + static_cast<int64_t>(i / kVectors) * Config::kGates);
    const uint32_t pair = one | one << 16;
    by = make_uint4(pair, pair, pair, pair);
  } else {
    by = load_l2_16(gate + static_cast<int64_t>(i) * 8);
  }
  reinterpret_cast<uint4*>(y)[i] = make_uint4(gated(value.x, by.x), gated(value.y, by.y),
                                              gated(value.z, by.z), gated(value.w, by.w));
}
