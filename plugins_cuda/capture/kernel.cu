// Capture: copies x to the columns from COLUMN·H on of captured, H = 8·VECTORS.
//
//   x         [rows, 8·VECTORS] bf16, in
//   captured  [rows, 8·CAPTURED_VECTORS] bf16, out in these columns
//
// A thread copies 16 bytes.
#include "../_device/ptx.cuh"

CONFIG

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    capture(const uint4* x, uint4* captured, int rows) {
  pdl_launch_dependents();
  const int index = blockIdx.x * Config::kThreads + threadIdx.x, row = index / Config::kVectors;
  pdl_wait();
  if (row >= rows) return;
  const int64_t place =
      static_cast<int64_t>(row) * Config::kCapturedVectors + Config::kColumn * Config::kVectors;
  captured[place + index % Config::kVectors] = load_l2_16(x + index);
}
