// The accumulating warpgroups of absorbed attention: scores, weights, sums, and the state of a
// split.
//
// Warpgroup 0 has the even tiles of a split, warpgroup 1 the odd ones. Each computes S = Q·Cᵀ [64
// heads, 64 tokens] by wgmma, and writes the weights to shared memory. Both then accumulate the
// weighted values of every tile, each for half of the columns, in the order of tiles.
//
// A pair of tiles is a chain of dependent steps: scores, weights and sums of the even tile, then
// weights and sums of the odd one. Only the scores of the odd tile overlap with the weights of the
// even one, because the two stages hold no further tile. Every split starts in the first stage, so
// that all addresses are constants. After an odd number of tiles the copying warpgroup waits for
// the sums of the last one.
//
// Config: the members of absorbed_memory.cuh, Q_HEADS and PLACES.
#pragma once

#include "absorbed_memory.cuh"
#include "config.cuh"

// One of the two accumulating warpgroups. Lane 4·g + t of warp w has heads 16w + 8j + g.
template <int group>
struct Adder {
  const Memory& memory;
  float sums[kOwnColumns / 2];  // of this warpgroup's columns 8n + 2t, + 1
  uint32_t held[kHeldSteps][4];
  float base[2];          // the reference score of the weights: see settle()
  float total[2];         // sum of the weights of this thread's keys
  uint32_t odd[kStages];  // whether the CTA has had an odd number of tiles in this stage

  __device__ __forceinline__ explicit Adder(const Memory& shared) : memory(shared), odd{} {}

  __device__ __forceinline__ static int head_of(int j) {
    return static_cast<int>(threadIdx.x) / 32 % 4 * 16 + 8 * j + threadIdx.x % 32 / 4;
  }
  // The first of this warpgroup's panels of values; with an odd number, both have the middle one.
  static constexpr int kFirstPanel = group * (kValuePanels - kOwnPanels);

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kOwnColumns / 2; ++i) sums[i] = 0.0f;
#pragma unroll
    for (int j = 0; j < 2; ++j) base[j] = no_maximum(), total[j] = 0.0f;
  }

  // Load a row's queries, zeros past the last head. Both warpgroups call it between items.
  __device__ __forceinline__ void load_queries(const uint4* q, int row) {
    named_barrier_sync(1, kConsumers);
    for (int i = threadIdx.x; i < kHeads * kEntryUnits; i += kConsumers) {
      const int head = i / kEntryUnits, unit = i % kEntryUnits;
      const int q_head = static_cast<int>(blockIdx.y) * kHeads + head;
      const int64_t from =
          static_cast<int64_t>(row) * Config::kQHeads + min(q_head, Config::kQHeads - 1);
      const int to = unit / 8 * kQueryUnits + head * 8 + ((unit % 8) ^ (head % 8));
      cp_async_16_or_zero(memory.queries + to, q + from * kEntryUnits + unit,
                          q_head < Config::kQHeads);
    }
    cp_async_commit();
    cp_async_wait<0>();
    fence_async_shared();
    named_barrier_sync(1, kConsumers);
    const int lane = threadIdx.x % 32, head = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < kHeldSteps; ++step) {
      const int unit = 2 * step + lane / 16;
      ldmatrix_x4(held[step],
                  memory.queries + kLastPanel * kQueryUnits + head * 8 + (unit ^ (head % 8)));
    }
    named_barrier_sync(1, kConsumers);
  }

  // S = Q·Cᵀ as the tile arrives: sums 4n + 2j, + 1 are those of head j at tokens 8n + 2t, + 1.
  __device__ __forceinline__ void start_scores(float (&score)[32]) {
    constexpr int stage = group;
    // The stride of panels in descriptors, which count 16-byte units.
    const uint64_t queries = wgmma_matrix(memory.queries);
    const uint64_t tokens = wgmma_matrix(memory.ring + stage * kStageUnits);
#pragma unroll
    for (int i = 0; i < 32; ++i) score[i] = 0.0f;
    wgmma_pin(held);
    wgmma_pin(score);
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      mbarrier_wait(memory.full + stage * kParts + part, odd[stage]);
      fence_async_shared();
#pragma unroll
      for (int panel = part_start(part); panel < part_start(part + 1); ++panel) {
        const uint64_t a = queries + panel * kQueryUnits, b = tokens + panel * kPanelUnits;
#pragma unroll
        for (int step = 0; step < 4 && 4 * panel + step < kEntrySteps; ++step) {
          if (panel < kLastPanel) {
            wgmma_bf16_shared<64>(score, a + 2 * step, b + 2 * step);
          } else {
            wgmma_bf16<64>(score, held[step], b + 2 * step);
          }
        }
      }
    }
    wgmma_commit();
  }

  // Compute the exponents' ``shift`` for a tile's weights. A head's base changes only if a score is
  // far above it, so that sums are rarely rescaled. Weights up to 2^8 are as exact as those up to 1
  // (conditional rescaling of FlashAttention-4).
  __device__ __forceinline__ void settle(float (&score)[32], Span sees, int tile, int parity,
                                         float (&shift)[2]) {
    const int t = threadIdx.x % 4, first = tile * kTile + 2 * t;
    if (tile * kTile < sees.first || tile * kTile + kTile - 1 > sees.last) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        if (!sees.holds(first + i / 4 * 8 + i % 2)) score[i] = no_maximum();
      }
    }
    float top[2] = {score[0], score[2]}, factor[2] = {1.0f, 1.0f};
#pragma unroll
    for (int i = 1; i < 32; ++i) top[i % 4 / 2] = fmaxf(top[i % 4 / 2], score[i]);
    if (__any_sync(kAllLanes, top[0] > base[0] + kSlack || top[1] > base[1] + kSlack)) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        top[j] = fmaxf(top[j], __shfl_xor_sync(kAllLanes, top[j], 1));
        top[j] = fmaxf(top[j], __shfl_xor_sync(kAllLanes, top[j], 2));
        if (top[j] > base[j] + kSlack) {
          factor[j] = exp2_fast(__fmul_rn(base[j] - top[j], kScale));
          base[j] = top[j];
        }
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) shift[j] = -__fmul_rn(finite_maximum(base[j]), kScale);
    mbarrier_wait(memory.spent + parity, odd[parity] ^ 1u);
    if (t != 0) return;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      memory.rescale[parity * kHeads + head_of(j)] = factor[j];
      memory.bases[parity * kHeads + head_of(j)] = base[j];
    }
  }

  // Convert half of a tile's scores to weights for both warpgroups; ``added`` accumulates them.
  template <int half>
  __device__ __forceinline__ void weigh(const float (&score)[32], const float (&shift)[2],
                                        int parity, float (&added)[2]) {
    constexpr int kUnits = 8 / kHalves;  // of 16 bytes, of a head
    unsigned char* to =
        reinterpret_cast<unsigned char*>(memory.weights(parity)) + threadIdx.x % 4 * 4;
#pragma unroll
    for (int n = half * kUnits; n < (half + 1) * kUnits; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int head = head_of(j);
        const float* own = score + 4 * n + 2 * j;
        const float low = exp2_fast(__fmaf_rn(own[0], kScale, shift[j]));
        const float high = exp2_fast(__fmaf_rn(own[1], kScale, shift[j]));
        added[j] += low;
        added[j] += high;
        *reinterpret_cast<uint32_t*>(to + 16 * (head * 8 + (n ^ (head % 8)))) =
            pack_bf16x2(low, high);
      }
    }
    fence_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(memory.weighed + kHalves * parity + half);
  }

  // Rescale the sums of earlier tiles to the base of the next one.
  __device__ __forceinline__ void rescale_sums(int parity) {
    float factor[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      factor[j] = memory.rescale[parity * kHeads + head_of(j)];
      base[j] = memory.bases[parity * kHeads + head_of(j)];
      total[j] = __fmul_rn(total[j], factor[j]);
    }
    // A factor of 1 changes nothing.
    if (__any_sync(kAllLanes, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < kOwnColumns / 2; ++i) sums[i] *= factor[i % 4 / 2];
    }
  }

  // sums += weights · values, for half of a tile's tokens.
  template <int parity, int half>
  __device__ __forceinline__ void start_sums() {
    constexpr int kSteps = kTile / 16 / kHalves;
    const uint64_t a = wgmma_matrix(memory.weights(parity));
    const uint64_t b = wgmma_columns(memory.ring + parity * kStageUnits + kFirstPanel * kPanelUnits,
                                     16 * kPanelUnits);
#pragma unroll
    for (int step = half * kSteps; step < (half + 1) * kSteps; ++step) {
      wgmma_bf16_columns<kOwnColumns>(sums, a + 2 * step, b + (step * 16 * 128 >> 4));
    }
    wgmma_commit();
  }

  // The weighted values of the next tile: first the half whose weights are ready, then the rest.
  template <int parity>
  __device__ __forceinline__ void begin_sums() {
    mbarrier_wait(memory.weighed + kHalves * parity, odd[parity]);
    rescale_sums(parity);
    fence_async_shared();
    wgmma_pin(sums);
    wgmma_fence();
    start_sums<parity, 0>();
  }
  template <int parity>
  __device__ __forceinline__ void end_sums() {
    mbarrier_wait(memory.weighed + kHalves * parity + 1, odd[parity]);
    start_sums<parity, 1>();
    odd[parity] ^= 1u;
  }

  // Wait for the sums, and release the tile and its weights.
  __device__ __forceinline__ void finish_sums(int parity) {
    wgmma_wait<0>();
    wgmma_pin(sums);
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    mbarrier_arrive(memory.empty + kParts * parity + group);
    if (kReaders == 2) mbarrier_arrive(memory.empty + kParts * parity + 1 - group);
    mbarrier_arrive(memory.spent + parity);
  }

  __device__ __forceinline__ void add_weights(const float (&added)[2]) {
#pragma unroll
    for (int j = 0; j < 2; ++j) total[j] += added[j];
  }

  // Process warpgroup 0's next tile. The second half of its weights is computed while the tensor
  // cores sum the first half.
  __device__ __forceinline__ void take_even(Span sees, int tile) {
    float score[32], shift[2], added[2] = {0.0f, 0.0f};
    start_scores(score);
    wgmma_wait<0>();
    wgmma_pin(score);
    settle(score, sees, tile, 0, shift);
    weigh<0>(score, shift, 0, added);
    begin_sums<0>();
    weigh<1>(score, shift, 0, added);
    end_sums<0>();
    add_weights(added);
    finish_sums(0);
  }

  // Process the next tile of the other warpgroup.
  template <int parity>
  __device__ __forceinline__ void take_other() {
    begin_sums<parity>();
    end_sums<parity>();
    finish_sums(parity);
  }

  // In warpgroup 1, process an even tile and the odd one ``tile`` after it. The tensor cores
  // compute the odd scores while warpgroup 0 computes the even weights. They sum the even tile
  // while this warpgroup computes the odd weights.
  __device__ __forceinline__ void take_two(Span sees, int tile) {
    float score[32], shift[2], added[2] = {0.0f, 0.0f};
    start_scores(score);
    begin_sums<0>();
    end_sums<0>();
    wgmma_wait<kHalves>();
    wgmma_pin(score);
    settle(score, sees, tile, 1, shift);
    weigh<0>(score, shift, 1, added);
    finish_sums(0);
    weigh<1>(score, shift, 1, added);
    begin_sums<1>();
    end_sums<1>();
    add_weights(added);
    finish_sums(1);
  }

  // Whether this warpgroup writes its columns 8n … 8n + 7; both have the middle panel.
  __device__ __forceinline__ static bool leaves(int n) {
    const int column = kFirstPanel * 64 + 8 * n;
    if (Config::kValue % 64 != 0 && column >= Config::kValue) return false;
    return kValuePanels % 2 == 0 || group == 0 || n >= 8;
  }

  // Write the state of a split to the workspaces.
  __device__ __forceinline__ void leave(int row, int split, float2* split_sums,
                                        uint4* split_values) {
    const int t = threadIdx.x % 4;
    float greatest[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kOwnColumns / 2; ++i) {
      float& maximum = greatest[i % 4 / 2];
      if (leaves(i / 4)) maximum = fmaxf(maximum, fabsf(sums[i]));
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int lanes = 1; lanes < 4; lanes *= 2) {
        total[j] += __shfl_xor_sync(kAllLanes, total[j], lanes);
        greatest[j] = fmaxf(greatest[j], __shfl_xor_sync(kAllLanes, greatest[j], lanes));
      }
      if (t == 0) memory.totals[group * kHeads + head_of(j)] = total[j];
    }
    named_barrier_sync(1, kConsumers);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int head = head_of(j), q_head = static_cast<int>(blockIdx.y) * kHeads + head;
      if (q_head >= Config::kQHeads) continue;
      const int64_t place =
          (static_cast<int64_t>(row) * Config::kQHeads + q_head) * Config::kPlaces + split;
      const StateScale scale(greatest[j]);
      if (t == 0) {
        // Only group 0 reads the totals: group 1 waits for it before the next split.
        float first = __fmul_rn(base[j], kScale);
        if (group == 0) first = memory.totals[head] + memory.totals[kHeads + head];
        split_sums[2 * place + group] = make_float2(first, scale.unit);
      }
      uint4* const to = split_values + place * kStateUnits + kFirstPanel * 8 + t;
#pragma unroll
      for (int n = 0; n < kOwnColumns / 8; n += 4) {
        if (!leaves(n)) continue;
        uint32_t pair[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* own = sums + 4 * (n + i) + 2 * j;
          pair[i] = pack_f16x2(own[0] * scale.inverse, own[1] * scale.inverse);
          if (Config::kValue % 32 != 0 && !leaves(n + i)) pair[i] = 0;
        }
        to[n] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
      }
    }
  }
};
