// Sorts the rows of a prompt chunk by expert: a deterministic counting sort by one CTA.
//
// Config: kExperts, kColumns (tokens of the widest tile).
//
// An entry (row · top_k + place) gets a position in the sorted rows: by expert, then by entry. The
// rows of an expert start at a multiple of 8, and are divided into tiles of equal size. Large tiles
// come first, so that the CTAs of the GEMMs, which process them one by one, finish at about the
// same time. 8192 entries, with 16 ballots per 32 of them, twice, take about 4 µs.
#pragma once

#include "config.cuh"
#include "prefill_tiles.cuh"
#include "../../_device/ptx.cuh"
#include "../../_device/ptx_routing.cuh"

constexpr int kSortThreads = 1024;
constexpr int kSortWarps = kSortThreads / 32;
constexpr int kSortAhead = 8;  // loads of a lane in flight

// Static shared memory has space for 32-bit counts of up to 288 experts. With more experts counts
// have 16 bits; a chunk has fewer than 65536 rows.
template <bool wide>
struct CountFor {
  using Of = int;
};
template <>
struct CountFor<false> {
  using Of = uint16_t;
};
using Count = CountFor<(Config::kExperts <= 288)>::Of;

struct SharedSort {
  Count counts[kSortWarps][Config::kExperts];  // of a warp's entries, then their first positions
  int totals[Config::kExperts];
  int first_row[Config::kExperts];
  int size[Config::kExperts], parts[Config::kExperts];  // ExpertCut
};

// The lanes with the same expert as this one; ``expert`` is below EXPERTS, or EXPERTS for none.
__device__ __forceinline__ uint32_t lanes_of_same(int expert) {
  uint32_t same = ~0u;
#pragma unroll
  for (int bit = 1; bit <= Config::kExperts; bit *= 2) {
    const uint32_t set = __ballot_sync(~0u, (expert & bit) != 0);
    same &= (expert & bit) != 0 ? set : ~set;
  }
  return same;
}

// Call ``use(entry, expert, rank)`` for the warp's entries. The rank is that among the entries of
// the same expert in ``counts``, which counts the entry afterwards.
template <class Use>
__device__ __forceinline__ void walk_entries(const int* chosen, int entries, Count* counts,
                                             const Use& use) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int share = round_up(ceil_div(entries, kSortWarps), 32);
  const int end = min(entries, (warp + 1) * share);
  int ahead[kSortAhead];
  for (int first = warp * share, i = 0; first < end; first += 32, i = (i + 1) % kSortAhead) {
    const int entry = first + lane;
    if (i == 0) {
#pragma unroll
      for (int j = 0; j < kSortAhead; ++j) {
        ahead[j] = entry + 32 * j < end ? load_l2_int(chosen + entry + 32 * j) : Config::kExperts;
      }
    }
    int expert = Config::kExperts;
#pragma unroll
    for (int j = 0; j < kSortAhead; ++j) expert = i == j ? ahead[j] : expert;
    const uint32_t same = lanes_of_same(expert);
    const int before = __popc(same & ((1u << lane) - 1u));
    const int rank = expert < Config::kExperts ? counts[expert] + before : 0;
    __syncwarp();
    if (expert < Config::kExperts) {
      use(entry, expert, rank);
      if (before == 0) counts[expert] += __popc(same);
    }
    __syncwarp();
  }
}

// The division of an expert's rows into tiles.
struct ExpertCut {
  int parts, size;
  __device__ __forceinline__ explicit ExpertCut(int rows)
      : parts(ceil_div(rows, Config::kColumns)),
        size(parts == 0 ? 0 : round_up(ceil_div(rows, parts), 8)) {}
};

// Return the first tile of an expert, after those of experts with larger tiles, to every lane.
__device__ __forceinline__ int tiles_before(const SharedSort& shared, int expert) {
  const int own = shared.size[expert];
  int before = 0;
  for (int e = threadIdx.x % 32; e < Config::kExperts; e += 32) {
    const int size = shared.size[e];
    if (size > own || (size == own && e < expert)) before += shared.parts[e];
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) before += __shfl_xor_sync(~0u, before, mask);
  return before;
}

// Convert ``chosen`` [entries] to ``position`` [entries] and ``tiles`` (prefill_experts.cuh).
__device__ __forceinline__ void sort_entries(const int* chosen, int entries, int* position,
                                             int* tiles, SharedSort& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int e = lane; e < Config::kExperts; e += 32) shared.counts[warp][e] = 0;
  __syncwarp();
  walk_entries(chosen, entries, shared.counts[warp], [](int, int, int) {});
  __syncthreads();
  for (int e = threadIdx.x; e < Config::kExperts; e += kSortThreads) {
    int total = 0;
    for (int w = 0; w < kSortWarps; ++w) {
      const int count = shared.counts[w][e];
      shared.counts[w][e] = total;
      total += count;
    }
    const ExpertCut cut(total);
    shared.totals[e] = total;
    shared.size[e] = cut.size;
    shared.parts[e] = cut.parts;
  }
  __syncthreads();
  if (warp == 0) {
    int rows_before = 0, all_tiles = 0;
    for (int base = 0; base < Config::kExperts; base += 32) {
      const int e = base + lane, total = e < Config::kExperts ? shared.totals[e] : 0;
      const int rows = round_up(total, 8), rows_through = warp_prefix_sum(rows);
      const int parts_through = warp_prefix_sum(e < Config::kExperts ? shared.parts[e] : 0);
      if (e < Config::kExperts) shared.first_row[e] = rows_before + rows_through - rows;
      rows_before += __shfl_sync(~0u, rows_through, 31);
      all_tiles += __shfl_sync(~0u, parts_through, 31);
    }
    if (lane == 0) {
      tiles[kTokenTiles] = all_tiles;
      tiles[kTakenGateUp] = 0;
      tiles[kTakenDown] = 0;
    }
  }
  __syncthreads();
  auto* const out = reinterpret_cast<TokenTile*>(tiles + kTilesHeader);
  for (int e = warp; e < Config::kExperts; e += kSortWarps) {
    const int total = shared.totals[e], size = shared.size[e];
    const int first = tiles_before(shared, e);
    for (int i = lane; i < shared.parts[e]; i += 32) {
      out[first + i] = {e, shared.first_row[e] + i * size, min(size, total - i * size), 0};
    }
  }
  walk_entries(chosen, entries, shared.counts[warp], [&](int entry, int expert, int rank) {
    position[entry] = shared.first_row[expert] + rank;
  });
}
