// SigmoidGate: y = x · σ(gate); the sigmoid is rounded to bf16.
//
//   x     bf16 [T, WIDTH], in
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

__device__ __forceinline__ float sigmoid(float x) {
  return bf16_to_float(float_to_bf16(1.0f / (1.0f + expf(-x))));
}

__device__ __forceinline__ uint32_t gated(uint32_t x, uint32_t gate) {
  const float2 value = unpack_bf16x2(x), by = unpack_bf16x2(gate);
  return pack_bf16x2(value.x * sigmoid(by.x), value.y * sigmoid(by.y));
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    sigmoid_gate(const uint16_t* x, const uint16_t* gate, uint16_t* y, int vectors) {
  pdl_launch_dependents();
  pdl_wait();
  const int i = blockIdx.x * Config::kThreads + threadIdx.x;
  if (i >= vectors) return;
  const uint4 value = load_l2_16(x + static_cast<int64_t>(i) * 8);
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
