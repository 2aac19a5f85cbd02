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
#include "../_device/normed_rows.cuh"
#include "device/held.cuh"

namespace {

constexpr bool kStores = Config::kStores != 0, kIsTree = Config::kIsTree != 0;

// Return the last node before `node` among its ancestors, −1 for the root.
__device__ __forceinline__ int ancestor_before(const int* bits, int node) {
  for (int word = (node - 1) / 32; node > 0 && word >= 0; --word) {
    unsigned set = static_cast<unsigned>(bits[word]);
    if (word == (node - 1) / 32) set &= 0xFFFFFFFFu >> (31 - (node - 1) % 32);
    if (set != 0) return 32 * word + 31 - __clz(static_cast<int>(set));
  }
  return -1;
}

__device__ __forceinline__ int64_t slot_of(const int* state_slot) {
  return min(max(load_l2_int(state_slot), 0), Config::kSlots - 1);
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
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const Held held(shared);
  held.load_weights(conv_weight, norm, head);
  cp_async_commit();
  const float decay_factor = decay_scale[head], decay_bias = dt_bias[head];
  if constexpr (Config::kWarms != 0) {
    // The slot can be outdated here; only L2 depends on it.
    const int64_t place = slot_of(state_slot + b);
    warm_slot(tail_pool + place * kWindow * kChannels,
              state_pool + (place * Config::kValueHeads + head) * kKeyWidth * kValueWidth,
              factor_pool + place * Config::kNodes * kFactors, head);
  }
  pdl_wait();
  const int64_t slot = slot_of(state_slot + b);
  const int to_replay = load_l2_int(replay_count + b);
  int first = load_l2_int(row_start + b), count = load_l2_int(row_start + b + 1) - first;
#pragma unroll 1
  for (int i = thread; i < Config::kPath; i += kThreads) {
    const int node = load_l2_int(replay_path + b * Config::kPath + i);
    held.path[i] = min(max(node, 0), Config::kNodes - 1);
  }
  if (count <= 0) {
    cp_async_wait<0>();
    return;
  }
  const int position = load_l2_int(positions + first);
  const int chunked = Config::kChunks ? rows_in_chunks(position, count, to_replay) : 0;
  first += chunked;
  count -= chunked;
  const bool starts = kStores && position == 0 && chunked == 0;
  const auto write_zeros = [&] {  // of padding
#pragma unroll 1
    for (int i = thread; i < count * kValueWidth; i += kThreads) {
      output[static_cast<int64_t>(first + i / kValueWidth) * kValues + head * kValueWidth +
             i % kValueWidth] = 0;
    }
  };
  const bool is_padding = !kStores && position == 0;
  // A single sequence is hardly ever padding, so its loads do not wait for its position.
  if (gridDim.y > 1 && is_padding) {
    write_zeros();
    cp_async_wait<0>();
    return;
  }
  __syncthreads();

  // All loads are in flight together: their latency is most of a launch with few rows.
  uint16_t* const tail = tail_pool + slot * kWindow * kChannels;
  float* const factors = factor_pool + slot * Config::kNodes * kFactors;
  const int columns = warp * kColumns + column_of_lane(), first_row = row_of_lane();
  const int column = columns + LaneState::own_column();
  float* const state = state_pool +
                       ((slot * Config::kValueHeads + head) * kKeyWidth + first_row) * kValueWidth +
                       columns;
  const int replayed = starts || chunked > 0 ? 0 : max(0, min(to_replay, Config::kPath));
  const auto row_of = [&](int row) {
    return rows + static_cast<int64_t>(first + row) * Config::kRowWidth;
  };
  LaneState s;
  if (starts) {
    s.clear();
#pragma unroll 1
    for (int i = thread; i < kTail * kMixed; i += kThreads) held.inputs[i] = 0;
  } else {
    if (kLaneRuns == 1) s.load(state);
    if (chunked > 0) {
      held.load_inputs(row_of(-kTail), 0, kTail, head);
    } else {
      held.load_past(factors, replayed, head);
      held.load_tail(tail, replayed, head);
    }
  }
  const auto load_rows = [&](int base, int live) {
    held.load_inputs(row_of(base), kTail, live, head);
    held.load_gates(row_of(base), live, head);
    if constexpr (kIsTree) {
#pragma unroll 1
      for (int i = thread; i < live * Config::kWords; i += kThreads)
        held.bits[i] = load_l2_int(ancestor_bits + first * Config::kWords + i);
    }
#pragma unroll 1
    for (int r = thread; r < live; r += kThreads) {
      const uint16_t* const gates = row_of(base + r) + kChannels + kValues + head;
      held.beta[r] = beta_of(gates);
      held.decay[r] = expf(log_decay_of(gates, Config::kValueHeads, decay_factor, decay_bias));
    }
    cp_async_commit();
  };
  int live = min(Config::kHeld, count);
  load_rows(0, live);
  // With a larger part of the state, registers do not suffice for the addresses of copies too.
  if (kLaneRuns == 2 && !starts) s.load(state);
  if constexpr (Config::kAhead > 0) {
    // The state of a CTA that starts when this one ends is read while this one computes.
    const int later = static_cast<int>(b * gridDim.x + head) + Config::kAhead;
    if (later < static_cast<int>(gridDim.x * gridDim.y)) {
      const int64_t place = slot_of(state_slot + later / Config::kValueHeads);
      warm(state_pool + (place * Config::kValueHeads + later % Config::kValueHeads) * kKeyWidth *
                            kValueWidth,
           kKeyWidth * kValueWidth);
    }
  }
  cp_async_wait<0>();
  __syncthreads();
  if (is_padding) {
    write_zeros();
    return;
  }
  // Data that value heads share is not read after this point, so the last CTA that arrives may
  // replace it at the end. The values have been loaded, so no memory fence is needed.
  int* const arrived = workspace_arrived + b * Config::kKeyHeads + key_head;
  int before_this = 0;
  if (kSharers > 1 && thread == 0) before_this = atomicAdd(arrived, 1);
#pragma unroll 1
  for (int i = 0; i < replayed; ++i) {
    s.replay(LaneVector(held.past_k + i * kKeyWidth + first_row), held.past_decay[i],
             Held::columns_of(held.past_change, i, columns));
  }
  if (!kStores && replayed > 0) s.store(state);

#pragma unroll 1
  for (int base = 0; base < count; base += Config::kHeld) {
    if (kStores && base > 0) {  // all rows of a step are held at once
      __syncthreads();
#pragma unroll 1
      for (int i = thread; i < kTail * kMixed; i += kThreads)
        held.inputs[i] = held.inputs[live * kMixed + i];
      __syncthreads();
      live = min(Config::kHeld, count - base);
      load_rows(base, live);
      cp_async_wait<0>();
      __syncthreads();
    }
    if constexpr (kIsTree) {
#pragma unroll 1
      for (int r = thread; r < live; r += kThreads) {
        int before = r;
#pragma unroll
        for (int i = kTail - 1; i >= 0; --i) {
          before =
              before <= 0 ? before - 1 : ancestor_before(held.bits + r * Config::kWords, before);
          held.source[r * kTail + i] = kTail + before;
        }
      }
      __syncthreads();
    }
    const auto source = [&](int r, int tap) {
      return kIsTree ? held.source[r * kTail + tap] : r + tap;
    };
#pragma unroll 1
    for (int i = thread; i < kMixed; i += kThreads) {
      float weight[Config::kTaps];
#pragma unroll
      for (int tap = 0; tap < Config::kTaps; ++tap)
        weight[tap] = bf16_to_float(held.taps[i * Config::kTaps + tap]);
#pragma unroll(kStores ? 4 : 1)
      for (int r = 0; r < live; ++r) {
        float sum = 0.0f;
#pragma unroll
        for (int tap = 0; tap < kTail; ++tap)
          sum = __fmaf_rn(weight[tap], held.input(source(r, tap), i), sum);
        sum = __fmaf_rn(weight[kTail], held.input(kTail + r, i), sum);
        const float value = silu(rounded(sum));
        if (i < kKeyWidth) {
          held.q[r * kKeyWidth + i] = rounded(value);
        } else if (i < 2 * kKeyWidth) {
          held.k[r * kKeyWidth + i - kKeyWidth] = rounded(value);
        } else {
          held.v[r * kValueWidth + i - 2 * kKeyWidth] = float_to_bf16(value);
        }
      }
    }
    __syncthreads();
#pragma unroll 1
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
      if constexpr (kIsTree) {
        if (source(r, kTail - 1) != kTail + r - 1) {
          // Another branch: apply its ancestors to the committed state.
          const int* const bits = held.bits + r * Config::kWords;
          s.load(state);
          for (int i = 0; i < r; ++i) {
            if (!(static_cast<unsigned>(bits[i / 32]) >> i % 32 & 1)) continue;
            s.replay(LaneVector(held.k + i * kKeyWidth + first_row), held.decay[i],
                     Held::columns_of(held.change, i, columns));
          }
        }
      }
      const int place = r * kKeyWidth + first_row;
      float change;
      const float mixed = s.advance(held.q + place, LaneVector(held.k + place),
                                    bf16_to_float(held.v[r * kValueWidth + column]), held.decay[r],
                                    held.beta[r], change);
      if (LaneState::is_owner()) {
        held.change[r * kValueWidth + column] = change;
        held.mixed[r * kValueWidth + column] = rounded(mixed);
      }
      __syncwarp();
    }
    __syncthreads();

#pragma unroll 1
    for (int r = warp; r < live; r += kWarps) {
      const int64_t row = first + base + r;
      const float* const mixed = held.mixed + r * kValueWidth;
      float sum = 0.0f;
      for (int i = lane; i < kValueWidth; i += 32) sum = __fmaf_rn(mixed[i], mixed[i], sum);
      const float scale = rsqrtf(warp_sum(sum) / kValueWidth + static_cast<float>(Config::kEps));
      for (int i = lane; i < kValueWidth; i += 32) {
        const float normed = rounded(rounded(mixed[i] * scale) * bf16_to_float(held.norm[i]));
        const float gate = bf16_to_float(held.gates[r * kValueWidth + i]);
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
    const uint16_t* const inputs = held.inputs + (kStores ? live * kMixed : 0);
#pragma unroll 1
    for (int i = thread; i < (kTail + kept) * (until - from) / 2; i += kThreads) {
      const int entry = i / ((until - from) / 2), element = from + i % ((until - from) / 2) * 2;
      *reinterpret_cast<uint32_t*>(tail + static_cast<int64_t>(entry) * kChannels +
                                   channel_of(element, head)) =
          *reinterpret_cast<const uint32_t*>(inputs + entry * kMixed + element);
    }
  };
  keep(2 * kKeyWidth, kMixed);
#pragma unroll 1
  for (int i = thread; i < kept * kValueWidth; i += kThreads) {
    const int64_t node = i / kValueWidth;
    factors[node * kFactors + head * kValueWidth + i % kValueWidth] = held.change[i];
  }
#pragma unroll 1
  for (int i = thread; i < kept; i += kThreads)
    factors[static_cast<int64_t>(i) * kFactors + kValues + kKeys + head] = held.decay[i];
  __syncthreads();
  if (*held.last == 0) return;
  keep(0, 2 * kKeyWidth);
#pragma unroll 1
  for (int i = thread; i < kept * kKeyWidth; i += kThreads) {
    const int64_t node = i / kKeyWidth;
    factors[node * kFactors + kValues + key_head * kKeyWidth + i % kKeyWidth] =
        held.k[i / kKeyWidth * kKeyWidth + i % kKeyWidth];
  }
}
