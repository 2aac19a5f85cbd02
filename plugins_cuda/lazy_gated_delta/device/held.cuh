// What a CTA of the row loop holds in shared memory, and the copies and prefetches that fill it.
#pragma once

#include "../../_device/l2_word.cuh"
#include "column.cuh"

constexpr int kMixed = 2 * kKeyWidth + kValueWidth;
constexpr int kFactors = kValues + kKeys + Config::kValueHeads;

// The channel of element i of a CTA's convolved inputs: the query and key of its key head, then its
// values.
__device__ __forceinline__ int channel_of(int i, int head) {
  const int key_head = head / kSharers;
  if (i < kKeyWidth) return key_head * kKeyWidth + i;
  if (i < 2 * kKeyWidth) return kKeys + key_head * kKeyWidth + i - kKeyWidth;
  return 2 * kKeys + head * kValueWidth + i - 2 * kKeyWidth;
}

// Copy elements from L2 with all threads, each kPiece at once: asynchronously if these are 16
// bytes. Element i has the place to(i) and comes from from(i). A launch of few rows executes its
// code about once, and reading instructions is a large part of its time: loops are not unrolled.
template <int kPiece, class To, class From>
__device__ __forceinline__ void copy_pieces(int elements, To to, From from) {
#pragma unroll 1
  for (int i = threadIdx.x * kPiece; i < elements; i += kThreads * kPiece) {
    if constexpr (kPiece * sizeof(*to(0)) == 16) {
      cp_async_16(to(i), from(i));
    } else if constexpr (sizeof(*to(0)) == 2) {
      *to(i) = load_l2_bf16(from(i));
    } else {
      *to(i) = load_l2_float(from(i));
    }
  }
}

struct Held {
  float* q;            // [HELD][kKeyWidth]
  float* k;            // [HELD][kKeyWidth]
  float* change;       // [HELD][kValueWidth]: δ
  float* mixed;        // [HELD][kValueWidth]: outputs
  float* past_change;  // [PATH][kValueWidth]: δ of replayed rows, where change and mixed follow
  float* past_k;       // [PATH][kKeyWidth], there too
  uint16_t* inputs;    // [kTail + HELD][kMixed]: of earlier rows, then of the rows
  uint16_t* v;         // [HELD][kValueWidth]
  uint16_t* gates;     // [HELD][kValueWidth]: logits of the output's gate
  uint16_t* taps;      // [kMixed][TAPS]: weights of the convolution
  uint16_t* norm;      // [kValueWidth]
  float* decay;        // [HELD]: e^g
  float* beta;         // [HELD]
  float* past_decay;   // [PATH]
  int* path;           // [PATH]: the replayed rows
  int* source;         // [HELD][kTail]: the earlier inputs of a row's convolution, in trees
  int* bits;           // [HELD][WORDS]
  volatile int* last;

  static constexpr int kRows = Config::kHeld, kPath = Config::kPath;
  static constexpr int kNew = 2 * kRows * kValueWidth, kPast = kPath * (kKeyWidth + kValueWidth);
  static constexpr int kLater = kNew > kPast ? kNew : kPast;
  static constexpr int kFloats = 2 * kRows * kKeyWidth + kLater;
  static constexpr int kHalves =
      (kTail + kRows) * kMixed + 2 * kRows * kValueWidth + kMixed * Config::kTaps + kValueWidth;
  static constexpr int kWordCount = 2 * kRows + 2 * kPath + kRows * (kTail + Config::kWords) + 1;
  static_assert(4 * kFloats + 2 * kHalves + 4 * kWordCount == Config::kSharedBytes,
                "as the launch says");

  __device__ __forceinline__ explicit Held(float* shared) {
    q = shared;
    k = q + kRows * kKeyWidth;
    past_change = change = k + kRows * kKeyWidth;
    mixed = change + kRows * kValueWidth;
    past_k = past_change + kPath * kValueWidth;
    inputs = reinterpret_cast<uint16_t*>(shared + kFloats);
    v = inputs + (kTail + kRows) * kMixed;
    gates = v + kRows * kValueWidth;
    taps = gates + kRows * kValueWidth;
    norm = taps + kMixed * Config::kTaps;
    decay = reinterpret_cast<float*>(norm + kValueWidth);
    beta = decay + kRows;
    past_decay = beta + kRows;
    path = reinterpret_cast<int*>(past_decay + kPath);
    source = path + kPath;
    bits = source + kRows * kTail;
    last = bits + kRows * Config::kWords;
  }

  // δ of a row in 4 columns.
  static __device__ __forceinline__ float4 columns_of(const float* changes, int row, int column) {
    return *reinterpret_cast<const float4*>(changes + row * kValueWidth + column);
  }
  __device__ __forceinline__ float input(int row, int element) const {
    return bf16_to_float(inputs[row * kMixed + element]);
  }

  // Weights, which no launch writes.
  __device__ __forceinline__ void load_weights(const uint16_t* conv_weight,
                                               const uint16_t* norm_weight, int head) const {
    constexpr int count = Config::kTaps;
    copy_pieces<8>(
        kMixed * count, [&](int i) { return taps + i; },
        [&](int i) { return conv_weight + channel_of(i / count, head) * count + i % count; });
    copy_pieces<8>(
        kValueWidth, [&](int i) { return norm + i; }, [&](int i) { return norm_weight + i; });
  }

  // The factors of the rows to replay, from a slot's pool.
  __device__ __forceinline__ void load_past(const float* factors, int replayed, int head) const {
    constexpr int piece = kFactors % 4 == 0 ? 4 : 1;
    const auto of_row = [&](int i) { return factors + static_cast<int64_t>(path[i]) * kFactors; };
    copy_pieces<piece>(
        replayed * kValueWidth, [&](int i) { return past_change + i; },
        [&](int i) { return of_row(i / kValueWidth) + head * kValueWidth + i % kValueWidth; });
    copy_pieces<piece>(
        replayed * kKeyWidth, [&](int i) { return past_k + i; },
        [&](int i) {
          return of_row(i / kKeyWidth) + kValues + head / kSharers * kKeyWidth + i % kKeyWidth;
        });
    copy_pieces<1>(
        replayed, [&](int i) { return past_decay + i; },
        [&](int i) { return of_row(i) + kValues + kKeys + head; });
  }

  // The inputs before the rows. Entry i of a slot's pool is an input before those of its rows, or
  // that of row i - kTail.
  __device__ __forceinline__ void load_tail(const uint16_t* pool, int replayed, int head) const {
    copy_pieces<8>(
        kTail * kMixed, [&](int i) { return inputs + i; },
        [&](int i) {
          const int place = replayed + i / kMixed;
          const int entry = place < kTail ? place : kTail + path[place - kTail];
          return pool + static_cast<int64_t>(entry) * kChannels + channel_of(i % kMixed, head);
        });
  }

  // The inputs of `count` rows from `rows` on, to the place `first` of the window.
  __device__ __forceinline__ void load_inputs(const uint16_t* rows, int first, int count,
                                              int head) const {
    constexpr int piece = Config::kRowWidth % 8 == 0 ? 8 : 1;
    copy_pieces<piece>(
        count * kMixed, [&](int i) { return inputs + first * kMixed + i; },
        [&](int i) {
          return rows + static_cast<int64_t>(i / kMixed) * Config::kRowWidth +
                 channel_of(i % kMixed, head);
        });
  }
  __device__ __forceinline__ void load_gates(const uint16_t* rows, int count, int head) const {
    constexpr int piece = Config::kRowWidth % 8 == 0 ? 8 : 1;
    copy_pieces<piece>(
        count * kValueWidth, [&](int i) { return gates + i; },
        [&](int i) {
          return rows + static_cast<int64_t>(i / kValueWidth) * Config::kRowWidth + kChannels +
                 head * kValueWidth + i % kValueWidth;
        });
  }
};

// Load `count` elements into L2, with all threads.
template <typename T>
__device__ __forceinline__ void warm(const T* from, int count) {
  constexpr int line = 128 / sizeof(T);
#pragma unroll 1
  for (int i = threadIdx.x * line; i < count; i += kThreads * line) warm_l2(from + i);
}

// Load a head's part of a slot into L2: its state, and the inputs and factors of all rows.
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
