// What benchmarks/exchange.py checks rounds of an exchange by: values that follow from the number
// of the round, drawn after a wait of random length, and their sum.
//
//   partial  [count] fp32, out: values of this rank and round
//   y        [count] bf16, in: their sum over the ranks
//   state    [2] int32, in: rounds before this program
//   wrong    [1] int32, in and out: elements of y that are not the sum
#include "bf16.cuh"
#include "ptx.cuh"
#include "ptx_peer.cuh"

CONFIG

__device__ __forceinline__ uint32_t mixed(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t h = a * 0x9E3779B1u ^ b * 0x85EBCA77u ^ c * 0xC2B2AE3Du;
  h = (h ^ h >> 15) * 0x2C1B3C6Du;
  h = (h ^ h >> 12) * 0x297A2D39u;
  return h ^ h >> 15;
}

__device__ __forceinline__ float drawn(uint32_t number, int rank, int place) {
  return static_cast<float>(mixed(number, rank, place) >> 8) * 0x1p-23f - 1.0f;
}

extern "C" __global__ void draw_values(float* partial, const int* state, int count, int rank,
                                       int exchange, int longest_ns) {
  pdl_launch_dependents();
  pdl_wait();
  const uint32_t number = static_cast<uint32_t>(load_l2_int(state)) + 1u + exchange;
  if (longest_ns > 0) {
    // CTAs wait for times of their own, and all of them for one of the rank's.
    const uint32_t both = mixed(number, rank, 0xFFFFFFFFu) % longest_ns +
                          mixed(number, rank, blockIdx.x) % longest_ns / 4;
    const uint64_t begun = nanoseconds();
    while (nanoseconds() - begun < both) {
    }
  }
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    partial[i] = drawn(number, rank, i);
  }
}

extern "C" __global__ void count_wrong(const uint16_t* y, const int* state, int* wrong, int count,
                                       int exchange) {
  pdl_launch_dependents();
  pdl_wait();
  const uint32_t number = static_cast<uint32_t>(load_l2_int(state)) + 1u + exchange;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    float sum = drawn(number, 0, i);
    for (int r = 1; r < Config::kRanks; ++r) sum += drawn(number, r, i);
    if (float_to_bf16(sum) != y[i]) atomicAdd(wrong, 1);
  }
}
