// Sorts the rows of a prompt chunk by expert: a counting sort by one CTA, the same for every run.
//
// Compile-time constants: EXPERTS, COLUMNS (tokens of the widest tile).
// An entry (row · top_k + place) gets a position among the sorted rows: experts ascending, entries
// ascending. An expert's rows begin at a multiple of 8, and are cut into tiles of equal size. Large
// tiles come first, so that the GEMMs' CTAs, which take them one by one, end at about the same
// time. Numbers: 8192 entries, 16 ballots for 32 of them, twice: about 4 µs.
#pragma once

#include "prefill_tiles.cuh"
#include "ptx.cuh"
#include "ptx_routing.cuh"

constexpr int kSortThreads = 1024;
constexpr int kSortWarps = kSortThreads / 32;

struct SharedSort {
  int counts[kSortWarps][EXPERTS];  // of a warp's entries, then where they begin
  int totals[EXPERTS];
  int first_row[EXPERTS];
};

// Lanes that have the same expert as this one; ``expert`` is below EXPERTS, or EXPERTS for none.
__device__ __forceinline__ uint32_t lanes_of_same(int expert) {
  uint32_t same = ~0u;
#pragma unroll
  for (int bit = 1; bit <= EXPERTS; bit *= 2) {
    const uint32_t set = __ballot_sync(~0u, (expert & bit) != 0);
    same &= (expert & bit) != 0 ? set : ~set;
  }
  return same;
}

// Calls ``use(entry, expert, rank)`` for the warp's entries: rank among those of the same expert
// in ``counts``, which then counts them too.
template <class Use>
__device__ __forceinline__ void walk_entries(const int* chosen, int entries, int* counts,
                                             const Use& use) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int share = round_up(ceil_div(entries, kSortWarps), 32);
  const int end = min(entries, (warp + 1) * share);
  for (int first = warp * share; first < end; first += 32) {
    const int entry = first + lane;
    const int expert = entry < end ? load_l2_int(chosen + entry) : EXPERTS;
    const uint32_t same = lanes_of_same(expert);
    const int before = __popc(same & ((1u << lane) - 1u));
    const int rank = expert < EXPERTS ? counts[expert] + before : 0;
    __syncwarp();
    if (expert < EXPERTS) {
      use(entry, expert, rank);
      if (before == 0) counts[expert] += __popc(same);
    }
    __syncwarp();
  }
}

// How an expert's rows are cut into tiles.
struct ExpertCut {
  int parts, size;
  __device__ __forceinline__ explicit ExpertCut(int rows)
      : parts(ceil_div(rows, COLUMNS)), size(parts == 0 ? 0 : round_up(ceil_div(rows, parts), 8)) {}
};

// Where the tiles of an expert begin: behind those of the experts with larger ones.
__device__ __forceinline__ int tiles_before(const int* totals, int expert) {
  const int own = ExpertCut(totals[expert]).size;
  int before = 0;
  for (int e = 0; e < EXPERTS; ++e) {
    const ExpertCut cut(totals[e]);
    if (cut.size > own || (cut.size == own && e < expert)) before += cut.parts;
  }
  return before;
}

// ``chosen`` [entries] → ``position`` [entries] and ``tiles`` (prefill_experts.cuh).
__device__ __forceinline__ void sort_entries(const int* chosen, int entries, int* position,
                                             int* tiles, SharedSort& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int e = lane; e < EXPERTS; e += 32) shared.counts[warp][e] = 0;
  __syncwarp();
  walk_entries(chosen, entries, shared.counts[warp], [](int, int, int) {});
  __syncthreads();
  for (int e = threadIdx.x; e < EXPERTS; e += kSortThreads) {
    int total = 0;
    for (int w = 0; w < kSortWarps; ++w) {
      const int count = shared.counts[w][e];
      shared.counts[w][e] = total;
      total += count;
    }
    shared.totals[e] = total;
  }
  __syncthreads();
  if (warp == 0) {
    int rows_before = 0, all_tiles = 0;
    for (int base = 0; base < EXPERTS; base += 32) {
      const int e = base + lane, total = e < EXPERTS ? shared.totals[e] : 0;
      const int rows = round_up(total, 8), rows_through = warp_prefix_sum(rows);
      const int parts_through = warp_prefix_sum(ExpertCut(total).parts);
      if (e < EXPERTS) shared.first_row[e] = rows_before + rows_through - rows;
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
  for (int e = threadIdx.x; e < EXPERTS; e += kSortThreads) {
    const int total = shared.totals[e];
    const ExpertCut cut(total);
    auto* const out = reinterpret_cast<TokenTile*>(tiles + kTilesHeader);
    const int first = tiles_before(shared.totals, e);
    for (int i = 0; i < cut.parts; ++i) {
      out[first + i] = {e, shared.first_row[e] + i * cut.size, min(cut.size, total - i * cut.size),
                        0};
    }
  }
  walk_entries(chosen, entries, shared.counts[warp], [&](int entry, int expert, int rank) {
    position[entry] = shared.first_row[expert] + rank;
  });
}
