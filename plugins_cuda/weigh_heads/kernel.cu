// WeighHeads: one thread per two values of a head.
#include "../_device/bf16.cuh"
#include "../_device/ptx.cuh"

extern "C" __global__ void __launch_bounds__(256)
    weigh_heads(const uint32_t* q,             // bf16 [T · n_idx, 2 · pairs]
                const uint16_t* head_weights,  // bf16 [T · n_idx]
                uint32_t* weighted,            // bf16 [T · n_idx, 2 · pairs], out
                int heads, int pairs) {
  pdl_launch_dependents();
  pdl_wait();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= heads * pairs) return;
  const float weight = bf16_to_float(head_weights[i / pairs]);
  weighted[i] = pack_bf16x2(bf16_low_to_float(q[i]) * weight, bf16_high_to_float(q[i]) * weight);
}
