// MlaAttention with absorbed queries, the end: slots join, and sums of latents become values.
//
//   w_v            bf16 [VALUE, V_HEADS, V_WIDTH], constant
//   b_v            bf16 [V_HEADS, V_WIDTH], constant; null without HAS_BIAS
//   row_start      i32  [BATCH + 1]
//   sinks          f32  [Q_HEADS], null without HAS_SINKS
//   attended       bf16 [T, Q_HEADS, V_WIDTH], out
//   workspace_sums, workspace_values, workspace_counts   as in absorbed.cu
//
// Grid (Q_HEADS, T): a row and head. 128 threads have four columns each, eight times over: slot s
// is joined by group s mod 8, in order, and the groups in order after it. Then the mean times the
// head's w_v, which is on its way since before the wait. A state is 4·VALUE bytes: 129 of
// them 264 KB, which an SM takes 2.4 µs for from L2.
#include "../_device/latent_mass.cuh"

namespace {

constexpr int kThreads = 1024;
constexpr int kGroups = 8;
constexpr int kQuads = kThreads / kGroups;  // of columns
constexpr int kAhead = 6;                   // states of a group that are asked for at once
constexpr int kUnits = V_WIDTH / 8;         // of 16 bytes, of a row of w_v
constexpr int kSlices = kThreads / kUnits;  // of the columns that are summed
constexpr int kSliceRows = ceil_div(VALUE, kSlices);
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;
static_assert(VALUE <= 4 * kQuads && VALUE % 4 == 0 && V_WIDTH >= 16 && V_WIDTH <= 128,
              "see above");

// Four columns of a group's slots.
__device__ __forceinline__ Part joined(int64_t place, int group, int quad, int slots,
                                       const float2* sums, const float* values) {
  Part all = empty_part();
  for (int first = group; first < slots; first += kGroups * kAhead) {
    Part part[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int slot = first + i * kGroups;
      part[i] = empty_part();
      if (slot >= slots) continue;
      const int64_t at = place * PLACES + slot;
      const float2 pair = load_l2_float2(sums + at);
      part[i].maximum = pair.x;
      part[i].sum = pair.y;
      if (4 * quad >= VALUE) continue;
      const uint4 bits = load_l2_16(values + at * VALUE + 4 * quad);
      part[i].values = make_float4(__uint_as_float(bits.x), __uint_as_float(bits.y),
                                   __uint_as_float(bits.z), __uint_as_float(bits.w));
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) join(all, part[i]);
  }
  return all;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    project_absorbed(const uint4* w_v, const uint16_t* b_v, const int* row_start,
                     const float* sinks, uint16_t* attended, const float2* workspace_sums,
                     const float* workspace_values, const int* workspace_counts) {
  DYNAMIC_SHARED(uint4, copied);  // [kSliceRows][kThreads]: w_v of the head
  __shared__ float4 group_values[kGroups][kQuads];
  __shared__ float2 group_sums[kGroups];
  __shared__ float mean[4 * kQuads];
  __shared__ float products[kThreads / 32][V_WIDTH];
  __shared__ float mass;
  const int head = blockIdx.x, row = blockIdx.y;
  const int unit = threadIdx.x % kUnits, slice = threadIdx.x / kUnits;
  const int v_head = head / (Q_HEADS / V_HEADS);
  pdl_launch_dependents();
  // A thread reads what it has copied itself.
  uint4* const weights = copied + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kSliceRows; ++i) {
    const int64_t k = min(slice + i * kSlices, VALUE - 1);
    cp_async_16(weights + i * kThreads, w_v + (k * V_HEADS + v_head) * kUnits + unit);
  }
  cp_async_commit();
  pdl_wait();
  const int slots = load_l2_int(workspace_counts + row);
  if (row >= row_start[BATCH]) {
    cp_async_wait<0>();
    return;
  }
  const int quad = threadIdx.x % kQuads, group = threadIdx.x / kQuads;
  const int64_t place = static_cast<int64_t>(row) * Q_HEADS + head;
  const Part own = joined(place, group, quad, slots, workspace_sums, workspace_values);
  group_values[group][quad] = own.values;
  if (quad == 0) group_sums[group] = make_float2(own.maximum, own.sum);
  __syncthreads();
  if (group == 0) {
    Part all = empty_part();
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      join(all, {group_sums[i].x, group_sums[i].y, group_values[i][quad]});
    }
    if (quad == 0) mass = mass_of(all, sinks, head);
    if (HAS_SINKS) join_sink(all, sinks[head]);
    const uint2 rounded = mean_of(all);
    mean[4 * quad] = bf16_to_float(static_cast<uint16_t>(rounded.x));
    mean[4 * quad + 1] = bf16_to_float(static_cast<uint16_t>(rounded.x >> 16));
    mean[4 * quad + 2] = bf16_to_float(static_cast<uint16_t>(rounded.y));
    mean[4 * quad + 3] = bf16_to_float(static_cast<uint16_t>(rounded.y >> 16));
  }
  __syncthreads();
  cp_async_wait<0>();
  float sums[8] = {};
#pragma unroll
  for (int i = 0; i < kSliceRows; ++i) {
    const int k = slice + i * kSlices;
    const float factor = k < VALUE ? mean[k] : 0.0f;
    const uint4 bits = weights[i * kThreads];
    const uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint16_t value = static_cast<uint16_t>(pairs[j / 2] >> (16 * (j % 2)));
      sums[j] = __fmaf_rn(factor, bf16_to_float(value), sums[j]);
    }
  }
#pragma unroll
  for (int step = kUnits; step < 32; step *= 2) {
#pragma unroll
    for (int j = 0; j < 8; ++j) sums[j] += __shfl_xor_sync(kAllLanes, sums[j], step);
  }
  if (threadIdx.x % 32 < kUnits) {
#pragma unroll
    for (int j = 0; j < 8; ++j) products[threadIdx.x / 32][8 * unit + j] = sums[j];
  }
  __syncthreads();
  if (threadIdx.x >= V_WIDTH) return;
  const int column = threadIdx.x;
  float sum = 0.0f;
#pragma unroll 8
  for (int warp = 0; warp < kThreads / 32; ++warp) sum += products[warp][column];
  if (HAS_BIAS) sum = __fmaf_rn(mass, bf16_to_float(b_v[v_head * V_WIDTH + column]), sum);
  attended[place * V_WIDTH + column] = float_to_bf16(sum);
}
