// MlaAttention with absorbed queries, last launch: merges splits, and projects sums to values.
//
//   w_v            bf16 [VALUE, V_HEADS, V_WIDTH], constant
//   b_v            bf16 [V_HEADS, V_WIDTH], constant; null without HAS_BIAS
//   row_start      i32  [BATCH + 1]
//   sinks          f32  [Q_HEADS], null without HAS_SINKS
//   attended       bf16 [T, Q_HEADS, V_WIDTH], out
//   workspace_sums, workspace_values, workspace_counts   see absorbed.cu
//
// Grid (Q_HEADS, T, groups of COLUMNS of a value): a row and head. The weight of a split depends on
// the maximum of all splits. 64 threads have 16 bytes of a state each, in sixteen groups: group s
// mod 16 adds split s, in order, and then the groups are added in order. The mean is multiplied by
// the head's w_v, which is loaded before griddepcontrol.wait. 129 states of 1 KB are 132 KB, which
// an SM reads from L2 in 1.2 µs.
//
// Constants: CTAS_OF_AN_SM, a limit of registers; AHEAD, states that a thread loads at once: all of
// them if a CTA has an SM to itself.
#include "device/config.cuh"
#include "device/latent_mass.cuh"
#include "device/latent_state.cuh"

namespace {

constexpr int kThreads = 1024;
constexpr int kGroupThreads = 64;
constexpr int kGroups = kThreads / kGroupThreads;
constexpr int kAhead = ceil_div(Config::kPlaces, kGroups) < Config::kAhead
                           ? ceil_div(Config::kPlaces, kGroups)
                           : Config::kAhead;
constexpr int kSummed = 8 * kStateUnits;
constexpr int kSplitWarps = ceil_div(Config::kPlaces, 32);  // with a split per thread
// Sums of groups of splits, then products of warps.
constexpr int kScratch = kGroups * kSummed > kThreads / 32 * Config::kColumns
                             ? kGroups * kSummed
                             : kThreads / 32 * Config::kColumns;
constexpr int kUnits = Config::kColumns / 8;     // of 16 bytes, of a row of w_v
constexpr int kHeadUnits = Config::kVWidth / 8;  // all of them
constexpr int kSlices = kThreads / kUnits;       // of the summed columns
constexpr int kSliceRows = ceil_div(Config::kValue, kSlices);
static_assert(kStateUnits <= kGroupThreads && Config::kPlaces <= kThreads &&
                  Config::kColumns >= 16 && Config::kColumns <= 128 &&
                  Config::kVWidth % Config::kColumns == 0,
              "see above");

// The result of all splits, and the factors of the two halves of each split's sums.
struct Weights {
  float2 of[Config::kPlaces];
  float warp_maxima[kSplitWarps], warp_sums[kSplitWarps];
  float maximum;

  // The complete CTA calls it, a thread per split with the sums of that split.
  __device__ __forceinline__ void find(uint4 bits, int splits) {
    const int split = threadIdx.x, warp = split / 32;
    if (split >= splits) bits = make_uint4(0, 0, __float_as_uint(no_maximum()), 0);
    const float own = __uint_as_float(bits.z);
    float local_maximum = own;
    if (warp < kSplitWarps) {
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        local_maximum = fmaxf(local_maximum, __shfl_xor_sync(kAllLanes, local_maximum, step));
      }
      if (split % 32 == 0) warp_maxima[warp] = local_maximum;
    }
    __syncthreads();
    if (warp < kSplitWarps) {
#pragma unroll
      for (int i = 0; i < kSplitWarps; ++i) local_maximum = fmaxf(local_maximum, warp_maxima[i]);
      const float weight = exp2_fast(own - finite_maximum(local_maximum));
      float all = __fmul_rn(__uint_as_float(bits.x), weight);
#pragma unroll
      for (int step = 16; step > 0; step /= 2) all += __shfl_xor_sync(kAllLanes, all, step);
      if (split % 32 == 0) warp_sums[warp] = all;
      if (split == 0) maximum = local_maximum;
      if (split < splits) {
        of[split] = make_float2(__fmul_rn(__uint_as_float(bits.y), weight),
                                __fmul_rn(__uint_as_float(bits.w), weight));
      }
    }
    __syncthreads();
  }

  // Return the sum of all splits' weights.
  __device__ __forceinline__ float sum() const {
    float all = 0.0f;
#pragma unroll
    for (int i = 0; i < kSplitWarps; ++i) all += warp_sums[i];
    return all;
  }
};

// Load this thread's states of every ``kGroups``-th split from ``first`` on; zeros past the last.
__device__ __forceinline__ void load_states(uint4 (&state)[kAhead], const uint4* states, int first,
                                            int splits) {
  const int unit = threadIdx.x % kGroupThreads;
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    const int split = first + i * kGroups;
    state[i] = make_uint4(0, 0, 0, 0);
    if (split < splits && unit < kStateUnits) {
      state[i] = load_l2_16(states + static_cast<int64_t>(split) * kStateUnits + unit);
    }
  }
}

// The shared memory of a row and head between states and values.
struct Joined {
  float scratch[kScratch];
  Weights split_weights;
  float mean[kSummed];
  float mass;

  // Compute the mean of ``splits`` states; this thread has loaded the first ones.
  __device__ __forceinline__ void join(uint4 (&state)[kAhead], const uint4* states, int splits,
                                       uint4 split_sums, const float* sinks, int head) {
    const int group = threadIdx.x / kGroupThreads, state_unit = threadIdx.x % kGroupThreads;
    split_weights.find(split_sums, splits);
    float own[8] = {};
    for (int first = group; first < splits; first += kGroups * kAhead) {
      if (first > group) load_states(state, states, first, splits);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int split = first + i * kGroups;
        if (split >= splits) break;
        const float2 halves = split_weights.of[split];
        const float weight = state_half(state_unit) == 0 ? halves.x : halves.y;
        const uint32_t pairs[4] = {state[i].x, state[i].y, state[i].z, state[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 pair = unpack_f16x2(pairs[j]);
          own[2 * j] = __fmaf_rn(pair.x, weight, own[2 * j]);
          own[2 * j + 1] = __fmaf_rn(pair.y, weight, own[2 * j + 1]);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (state_unit >= kStateUnits) continue;
      float* const to = scratch + group * kSummed + state_column(state_unit, j);
      *reinterpret_cast<float2*>(to) = make_float2(own[2 * j], own[2 * j + 1]);
    }
    __syncthreads();
    for (int column = threadIdx.x; column < kSummed; column += kThreads) {
      Part all{split_weights.maximum, split_weights.sum(), make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll
      for (int i = 0; i < kGroups; ++i) all.values.x += scratch[i * kSummed + column];
      if (column == 0) mass = mass_of(all, sinks, head);
      if (Config::kHasSinks) join_sink(all, sinks[head]);
      mean[column] = bf16_low_to_float(mean_of(all).x);
    }
    __syncthreads();
  }

  // Multiply the mean by the weights that this thread has copied; warps' products go to scratch.
  __device__ __forceinline__ void multiply(const uint4* weights) {
    const int unit = threadIdx.x % kUnits, slice = threadIdx.x / kUnits;
    float sums[8] = {};
#pragma unroll
    for (int i = 0; i < kSliceRows; ++i) {
      const int k = slice + i * kSlices;
      const float factor = k < Config::kValue ? mean[k] : 0.0f;
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
      for (int j = 0; j < 8; ++j)
        scratch[threadIdx.x / 32 * Config::kColumns + 8 * unit + j] = sums[j];
    }
    __syncthreads();
  }

  // Return value ``column`` of the head; ``bias`` is that of b_v.
  __device__ __forceinline__ uint16_t value(int column, const uint16_t* bias) const {
    float sum = 0.0f;
#pragma unroll 8
    for (int warp = 0; warp < kThreads / 32; ++warp)
      sum += scratch[warp * Config::kColumns + column];
    if (Config::kHasBias) sum = __fmaf_rn(mass, bf16_to_float(*bias), sum);
    return float_to_bf16(sum);
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, Config::kCtasOfAnSm)
    project_absorbed(const uint4* w_v, const uint16_t* b_v, const int* row_start,
                     const float* sinks, uint16_t* attended, const float4* workspace_sums,
                     const uint4* workspace_values, const int* workspace_counts) {
  DYNAMIC_SHARED(uint4, copied);  // [kSliceRows][kThreads]: w_v of the head's columns
  static_assert(16 * kSliceRows * kThreads == Config::kSharedBytes, "as the launch says");
  __shared__ Joined joined;
  const int head = blockIdx.x, row = blockIdx.y;
  const int v_head = head / (Config::kQHeads / Config::kVHeads);
  pdl_launch_dependents();
  // A thread reads only bytes that it has copied.
  uint4* const weights = copied + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kSliceRows; ++i) {
    const int64_t k = min(static_cast<int>(threadIdx.x) / kUnits + i * kSlices, Config::kValue - 1);
    const int64_t unit = blockIdx.z * kUnits + threadIdx.x % kUnits;
    cp_async_16(weights + i * kThreads, w_v + (k * Config::kVHeads + v_head) * kHeadUnits + unit);
  }
  cp_async_commit();
  // A guess from the previous layer's launch, which usually has the same number of splits.
  const int guess = min(max(load_l2_int(workspace_counts + row), 0), Config::kPlaces);
  pdl_wait();
  const int splits = load_l2_int(workspace_counts + row);
  // Loaded for unused splits too.
  const int64_t place = static_cast<int64_t>(row) * Config::kQHeads + head;
  const int own_split = min(static_cast<int>(threadIdx.x), Config::kPlaces - 1);
  const uint4 split_sums = load_l2_16(workspace_sums + place * Config::kPlaces + own_split);
  const uint4* const states = workspace_values + place * Config::kPlaces * kStateUnits;
  const int group = threadIdx.x / kGroupThreads;
  uint4 state[kAhead];
  load_states(state, states, group, guess);
  if (row >= row_start[Config::kBatch]) {
    cp_async_wait<0>();
    return;
  }
  if (splits > guess) load_states(state, states, group, splits);
  joined.join(state, states, splits, split_sums, sinks, head);
  cp_async_wait<0>();
  joined.multiply(weights);
  if (threadIdx.x >= Config::kColumns) return;
  const int column = blockIdx.z * Config::kColumns + threadIdx.x;
  attended[place * Config::kVWidth + column] =
      joined.value(threadIdx.x, b_v + v_head * Config::kVWidth + column);
}
