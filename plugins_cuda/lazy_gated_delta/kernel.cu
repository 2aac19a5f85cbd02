// LazyGatedDelta: convolution, gates, the delta rule and its gated norm in one launch.
//
//   rows           bf16 [T, ROW_WIDTH], in: CHANNELS of q, k and v, the gate [Hv·Dv], β, decay [Hv]
//   conv_weight    bf16 [CHANNELS, 1, TAPS], in, constant
//   decay_scale    f32  [Hv], in, constant, as dt_bias is
//   norm           bf16 [Dv], in, constant
//   positions      i32  [T], in
//   row_start      i32  [B + 1], in
//   ancestor_bits  i32  [T, WORDS], in
//   state_slot     i32  [B], in, as replay_count is
//   replay_path    i32  [B, PATH], in
//   tail_pool      bf16 [slots, TAPS − 1 + NODES, CHANNELS], in and out
//   state_pool     f32  [slots, Hv, Dk, Dv], in and out
//   factor_pool    f32  [slots, NODES, Hv·Dv + Hk·Dk + Hv], in and out: δ, k, e^g
//   output         bf16 [T, Hv·Dv], out
//   workspace_arrived  i32 [B, Hk], zeros before and after
//
// Grid (value heads, sequences). A CTA holds the state of its head in registers: a warp has 8
// columns, a lane a 16th of 4 columns. It reads and writes the state once: 128 KB for heads of 128,
// 6.3 MB for the 48 heads of a layer of 27B, 1.4 µs at 4.53 TB/s. Columns do not depend on each
// other, so no barrier separates rows.
//
// Value heads of a key head share inputs and keys. Each of their CTAs counts itself once it has
// read these, and the last one writes them, so that no CTA waits at the end.
//
// With kChunks, prepare_chunks.cu and apply_chunks.cu have already advanced the state by the
// complete chunks of a prompt; this kernel computes the rows after them.
//
// The same two operations (decay_by, add) apply a row and replay it, so the state after replayed
// rows has the bits of the rows themselves.
#include "../_device/l2_word.cuh"
#include "../_device/normed_rows.cuh"
#include "device/column.cuh"
#include "device/inputs.cuh"

namespace {

constexpr int kKeys = Config::kKeyHeads * kKeyWidth, kValues = Config::kValueHeads * kValueWidth;
constexpr int kChannels = Config::kChannels, kMixed = 2 * kKeyWidth + kValueWidth;
constexpr int kSharers = Config::kValueHeads / Config::kKeyHeads;
constexpr int kTail = Config::kTaps - 1, kWindow = kTail + Config::kNodes;
constexpr int kFactors = kValues + kKeys + Config::kValueHeads;
constexpr bool kStores = Config::kStores != 0;
constexpr float kUnitEps = 1e-6f;
static_assert(kChannels == 2 * kKeys + kValues, "queries, keys and values");

// Shared memory, in words of 4 bytes.
struct Held {
  float* q;          // [HELD][kKeyWidth]
  float* k;          // [HELD][kKeyWidth]
  float* v;          // [HELD][kValueWidth]
  float* change;     // [HELD][kValueWidth]: δ
  float* mixed;      // [HELD][kValueWidth]: outputs
  float* decay;      // [HELD]: e^g
  float* beta;       // [HELD]
  uint16_t* inputs;  // [kTail + HELD][kMixed]: of earlier rows, then of the rows
  int* source;       // [HELD][kTail]: the earlier inputs of a row's convolution
  int* bits;         // [HELD][WORDS]
  int* entry;        // [kTail]: the entries of the pool that make up the window
  volatile int* last;

  __device__ explicit Held(float* shared) {
    constexpr int rows = Config::kHeld;
    q = shared;
    k = q + rows * kKeyWidth;
    v = k + rows * kKeyWidth;
    change = v + rows * kValueWidth;
    mixed = change + rows * kValueWidth;
    decay = mixed + rows * kValueWidth;
    beta = decay + rows;
    inputs = reinterpret_cast<uint16_t*>(beta + rows);
    source = reinterpret_cast<int*>(inputs + (kTail + rows) * kMixed);
    bits = source + rows * kTail;
    entry = bits + rows * Config::kWords;
    last = entry + kTail;
  }

  // δ of a row in 4 columns.
  __device__ __forceinline__ float4 change_of(int row, int column) const {
    return *reinterpret_cast<const float4*>(change + row * kValueWidth + column);
  }
};
static_assert(4 * (Config::kHeld * (2 * kKeyWidth + 3 * kValueWidth + 2) +
                   (kTail + Config::kHeld) * kMixed / 2 + Config::kHeld * (kTail + Config::kWords) +
                   kTail + 1) ==
                  Config::kSharedBytes,
              "as the launch says");

// The channel of element i of a CTA's convolved inputs: the query and key of its key head, then its
// values.
__device__ __forceinline__ int channel_of(int i, int head) {
  const int key_head = head / kSharers;
  if (i < kKeyWidth) return key_head * kKeyWidth + i;
  if (i < 2 * kKeyWidth) return kKeys + key_head * kKeyWidth + i - kKeyWidth;
  return 2 * kKeys + head * kValueWidth + i - 2 * kKeyWidth;
}

// Return the last node before `node` among its ancestors, −1 for the root.
__device__ __forceinline__ int ancestor_before(const int* bits, int node) {
  for (int word = (node - 1) / 32; node > 0 && word >= 0; --word) {
    unsigned set = static_cast<unsigned>(bits[word]);
    if (word == (node - 1) / 32) set &= 0xFFFFFFFFu >> (31 - (node - 1) % 32);
    if (set != 0) return 32 * word + 31 - __clz(static_cast<int>(set));
  }
  return -1;
}

// Load `count` elements into L2, with all threads.
template <typename T>
__device__ __forceinline__ void warm(const T* from, int count) {
  constexpr int line = 128 / sizeof(T);
  for (int i = threadIdx.x * line; i < count; i += kThreads * line) warm_l2(from + i);
}

// Load a head's weights, which other weights have evicted from L2 since the last step.
__device__ __forceinline__ void warm_constants(const uint16_t* conv_weight,
                                               const float* decay_scale, const float* dt_bias,
                                               const uint16_t* norm, int head) {
  warm(conv_weight + channel_of(0, head) * Config::kTaps, kKeyWidth * Config::kTaps);
  warm(conv_weight + channel_of(kKeyWidth, head) * Config::kTaps, kKeyWidth * Config::kTaps);
  warm(conv_weight + channel_of(2 * kKeyWidth, head) * Config::kTaps, kValueWidth * Config::kTaps);
  warm(decay_scale + head, 1);
  warm(dt_bias + head, 1);
  warm(norm, kValueWidth);
}

// Load a head's part of a slot: its state, and the inputs and factors of all rows.
__device__ __forceinline__ void warm_slot(const uint16_t* tail, const float* state,
                                          const float* factors, int head) {
  warm(state, kKeyWidth * kValueWidth);
#pragma unroll 1
  for (int i = 0; i < kWindow; ++i) {
    const uint16_t* const inputs = tail + static_cast<int64_t>(i) * kChannels;
    warm(inputs + channel_of(0, head), kKeyWidth);
    warm(inputs + channel_of(kKeyWidth, head), kKeyWidth);
    warm(inputs + channel_of(2 * kKeyWidth, head), kValueWidth);
  }
#pragma unroll 1
  for (int i = 0; i < Config::kNodes; ++i) {
    const float* const of_row = factors + static_cast<int64_t>(i) * kFactors;
    warm(of_row + head * kValueWidth, kValueWidth);
    warm(of_row + kValues + head / kSharers * kKeyWidth, kKeyWidth);
    warm(of_row + kValues + kKeys + head, 1);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads,
                                             kLaneRows == 1 ? 1024 / kThreads : Config::kCtas)
    lazy_gated_delta(const uint16_t* rows, const uint16_t* conv_weight, const float* decay_scale,
                     const float* dt_bias, const uint16_t* norm, const int* positions,
                     const int* row_start, const int* ancestor_bits, const int* state_slot,
                     const int* replay_path, const int* replay_count, uint16_t* tail_pool,
                     float* state_pool, float* factor_pool, uint16_t* output,
                     int* workspace_arrived) {
  DYNAMIC_SHARED(float, shared);
  pdl_launch_dependents();
  const int head = blockIdx.x, b = blockIdx.y, key_head = head / kSharers;
  if constexpr (Config::kWarms != 0) {
    warm_constants(conv_weight, decay_scale, dt_bias, norm, head);
    // The slot can be outdated here; only L2 depends on it.
    const int64_t place = min(max(load_l2_int(state_slot + b), 0), Config::kSlots - 1);
    warm_slot(tail_pool + place * kWindow * kChannels,
              state_pool + (place * Config::kValueHeads + head) * kKeyWidth * kValueWidth,
              factor_pool + place * Config::kNodes * kFactors, head);
  }
  pdl_wait();
  const int64_t slot = load_l2_int(state_slot + b);
  const int to_replay = load_l2_int(replay_count + b);
  int first = load_l2_int(row_start + b), count = load_l2_int(row_start + b + 1) - first;
  if (count <= 0) return;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int position = load_l2_int(positions + first);
  const int chunked = Config::kChunks ? rows_in_chunks(position, count, to_replay) : 0;
  first += chunked;
  count -= chunked;
  const bool starts = position == 0 && chunked == 0;
  if (starts && !kStores) {  // padding
    for (int i = thread; i < count * kValueWidth; i += kThreads) {
      output[static_cast<int64_t>(first + i / kValueWidth) * kValues + head * kValueWidth +
             i % kValueWidth] = 0;
    }
    return;
  }

  const Held held(shared);
  uint16_t* const tail = tail_pool + slot * kWindow * kChannels;
  float* const factors = factor_pool + slot * Config::kNodes * kFactors;
  const int columns = warp * kColumns + column_of_lane(), first_row = row_of_lane();
  const int column = columns + LaneState::own_column();
  float* const state = state_pool +
                       ((slot * Config::kValueHeads + head) * kKeyWidth + first_row) * kValueWidth +
                       columns;
  const int replayed = starts || chunked > 0 ? 0 : min(to_replay, Config::kPath);
  const auto node_of = [&](int i) {
    const int node = load_l2_int(replay_path + b * Config::kPath + i);
    return min(max(node, 0), Config::kNodes - 1);
  };
  LaneState s;
  if (starts) {
    s.clear();
  } else {
    s.load(state);
  }

  // The accepted rows of the last step, and the inputs before this launch's rows.
  if (thread < kTail) {
    const int place = replayed + thread;
    held.entry[thread] = place < kTail ? place : kTail + node_of(place - kTail);
  }
  for (int i = thread; i < replayed * kKeyWidth; i += kThreads) {
    const int64_t node = node_of(i / kKeyWidth);
    held.k[i / kKeyWidth * kKeyWidth + i % kKeyWidth] =
        load_l2_float(factors + node * kFactors + kValues + key_head * kKeyWidth + i % kKeyWidth);
  }
  for (int i = thread; i < replayed * kValueWidth; i += kThreads) {
    const int64_t node = node_of(i / kValueWidth);
    held.change[i] =
        load_l2_float(factors + node * kFactors + head * kValueWidth + i % kValueWidth);
  }
  for (int i = thread; i < replayed; i += kThreads) {
    const int64_t node = node_of(i);
    held.decay[i] = load_l2_float(factors + node * kFactors + kValues + kKeys + head);
  }
  __syncthreads();
  constexpr int pairs = kMixed / 2;
  const auto pair_of = [&](int row) {
    return reinterpret_cast<uint32_t*>(held.inputs) + row * pairs;
  };
  for (int i = thread; i < kTail * pairs; i += kThreads) {
    const int entry = held.entry[i / pairs], channel = channel_of(i % pairs * 2, head);
    const int64_t before = first - kTail + i / pairs;  // in chunks of this launch
    const uint16_t* const input = chunked > 0
                                      ? rows + before * Config::kRowWidth + channel
                                      : tail + static_cast<int64_t>(entry) * kChannels + channel;
    pair_of(0)[i] = starts ? 0 : load_l2_pair(input);
  }
  // Data that value heads share is not read after this point, so the last CTA that arrives may
  // replace it at the end. The values have been loaded, so no memory fence is needed.
  __syncthreads();
  int* const arrived = workspace_arrived + b * Config::kKeyHeads + key_head;
  int before_this = 0;
  if (kSharers > 1 && thread == 0) before_this = atomicAdd(arrived, 1);
#pragma unroll 1
  for (int i = 0; i < replayed; ++i) {
    s.replay(LaneVector(held.k + i * kKeyWidth + first_row), held.decay[i],
             held.change_of(i, columns));
  }
  if (!kStores && replayed > 0) s.store(state);

  int live = 0;
#pragma unroll 1
  for (int base = 0; base < count; base += Config::kHeld) {
    __syncthreads();
    if (base > 0) {  // the last inputs of the rows before
      for (int i = thread; i < kTail * pairs; i += kThreads) pair_of(0)[i] = pair_of(live)[i];
      __syncthreads();
    }
    live = min(Config::kHeld, count - base);
    for (int i = thread; i < live * pairs; i += kThreads) {
      const int64_t row = first + base + i / pairs;
      pair_of(kTail)[i] =
          load_l2_pair(rows + row * Config::kRowWidth + channel_of(i % pairs * 2, head));
    }
    if constexpr (Config::kIsTree != 0) {
      for (int i = thread; i < live * Config::kWords; i += kThreads)
        held.bits[i] = load_l2_int(ancestor_bits + first * Config::kWords + i);
      __syncthreads();
    }
    for (int r = thread; r < live; r += kThreads) {
      int before = base + r;
#pragma unroll
      for (int i = kTail - 1; i >= 0; --i) {
        const bool follows = Config::kIsTree == 0 || before <= 0;
        before = follows ? before - 1 : ancestor_before(held.bits + r * Config::kWords, before);
        held.source[r * kTail + i] = kTail + before - base;
      }
      const int64_t row = first + base + r;
      const uint16_t* const gates = rows + row * Config::kRowWidth + kChannels + kValues + head;
      held.beta[r] = beta_of(gates);
      held.decay[r] =
          expf(log_decay_of(gates, Config::kValueHeads, decay_scale[head], dt_bias[head]));
    }
    __syncthreads();
    const auto input_of = [&](int row, int i) {
      return bf16_to_float(held.inputs[row * kMixed + i]);
    };
    for (int i = thread; i < kMixed; i += kThreads) {
      const int channel = channel_of(i, head);
      float weight[Config::kTaps];
#pragma unroll
      for (int tap = 0; tap < Config::kTaps; ++tap)
        weight[tap] = bf16_to_float(conv_weight[channel * Config::kTaps + tap]);
#pragma unroll 4
      for (int r = 0; r < live; ++r) {
        float sum = 0.0f;
#pragma unroll
        for (int tap = 0; tap < kTail; ++tap)
          sum = __fmaf_rn(weight[tap], input_of(held.source[r * kTail + tap], i), sum);
        sum = __fmaf_rn(weight[kTail], input_of(kTail + r, i), sum);
        const float value = rounded(silu(rounded(sum)));
        if (i < kKeyWidth) {
          held.q[r * kKeyWidth + i] = value;
        } else if (i < 2 * kKeyWidth) {
          held.k[r * kKeyWidth + i - kKeyWidth] = value;
        } else {
          held.v[r * kValueWidth + i - 2 * kKeyWidth] = value;
        }
      }
    }
    __syncthreads();
    for (int item = warp; item < 2 * live; item += kWarps) {
      float* const vector = (item % 2 ? held.k : held.q) + item / 2 * kKeyWidth;
      float sum = 0.0f;
      for (int i = lane; i < kKeyWidth; i += 32) {
        const float value = vector[i];
        sum = __fmaf_rn(value, value, sum);
      }
      float scale = rsqrtf(warp_sum(sum) + kUnitEps);
      if (item % 2 == 0) scale *= rsqrtf(static_cast<float>(kKeyWidth));
      for (int i = lane; i < kKeyWidth; i += 32) vector[i] *= scale;
    }
    __syncthreads();

#pragma unroll 1
    for (int r = 0; r < live; ++r) {
      if constexpr (Config::kIsTree != 0) {
        if (held.source[r * kTail + kTail - 1] != kTail + r - 1) {
          // Another branch: apply its ancestors to the committed state.
          const int* const bits = held.bits + r * Config::kWords;
          s.load(state);
          for (int i = 0; i < r; ++i) {
            if (!(static_cast<unsigned>(bits[i / 32]) >> i % 32 & 1)) continue;
            s.replay(LaneVector(held.k + i * kKeyWidth + first_row), held.decay[i],
                     held.change_of(i, columns));
          }
        }
      }
      const int place = r * kKeyWidth + first_row;
      float change;
      const float mixed =
          s.advance(held.q + place, LaneVector(held.k + place), held.v[r * kValueWidth + column],
                    held.decay[r], held.beta[r], change);
      if (LaneState::is_owner()) {
        held.change[r * kValueWidth + column] = change;
        held.mixed[r * kValueWidth + column] = rounded(mixed);
      }
      __syncwarp();
    }
    __syncthreads();

    for (int r = warp; r < live; r += kWarps) {
      const int64_t row = first + base + r;
      const float* const mixed = held.mixed + r * kValueWidth;
      float sum = 0.0f;
      for (int i = lane; i < kValueWidth; i += 32) sum = __fmaf_rn(mixed[i], mixed[i], sum);
      const float scale = rsqrtf(warp_sum(sum) / kValueWidth + static_cast<float>(Config::kEps));
      const uint16_t* const gates = rows + row * Config::kRowWidth + kChannels + head * kValueWidth;
      for (int i = lane; i < kValueWidth; i += 32) {
        const float normed = rounded(rounded(mixed[i] * scale) * bf16_to_float(norm[i]));
        const float gate = bf16_to_float(load_l2_bf16(gates + i));
        output[row * kValues + head * kValueWidth + i] = float_to_bf16(normed * silu(gate));
      }
    }
  }

  if (thread == 0) {
    const bool is_last = kSharers == 1 || before_this == kSharers - 1;
    if (is_last && kSharers > 1) *arrived = 0;
    *held.last = is_last;
  }
  // What the slot keeps: each head's own part, then the shared part.
  if (kStores && count > 0) s.store(state);
  const int kept = kStores ? 0 : count;
  const auto keep = [&](int from, int until) {
    const uint32_t* const inputs = pair_of(kStores ? live : 0);
    for (int i = thread; i < (kTail + kept) * (until - from) / 2; i += kThreads) {
      const int entry = i / ((until - from) / 2), element = from + i % ((until - from) / 2) * 2;
      *reinterpret_cast<uint32_t*>(tail + static_cast<int64_t>(entry) * kChannels +
                                   channel_of(element, head)) = inputs[entry * pairs + element / 2];
    }
  };
  keep(2 * kKeyWidth, kMixed);
  for (int i = thread; i < kept * kValueWidth; i += kThreads) {
    const int64_t node = i / kValueWidth;
    factors[node * kFactors + head * kValueWidth + i % kValueWidth] = held.change[i];
  }
  for (int i = thread; i < kept; i += kThreads)
    factors[static_cast<int64_t>(i) * kFactors + kValues + kKeys + head] = held.decay[i];
  __syncthreads();
  if (*held.last == 0) return;
  keep(0, 2 * kKeyWidth);
  for (int i = thread; i < kept * kKeyWidth; i += kThreads) {
    const int64_t node = i / kKeyWidth;
    factors[node * kFactors + kValues + key_head * kKeyWidth + i % kKeyWidth] =
        held.k[i / kKeyWidth * kKeyWidth + i % kKeyWidth];
  }
}
