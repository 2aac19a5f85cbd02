// The ring of a team's tiles, and the attention of a tile run. In the names of these kernels, a
// slot is a split of the context, and a chain is a tile run.
//
// Config: the members of attention_inputs.cuh, and STAGES.
#pragma once

#include "attention_inputs.cuh"
#include "config.cuh"

// Copies of tiles are issued STAGES tiles ahead. `ahead` is the next tile to copy: its settle()
// moves from the end of a tile run to the next one, and its slot is SPLIT or more after the last.
template <class Cursor>
struct TeamRing {
  uint4* stages;  // [STAGES][keys, values] of the team
  Cursor ahead;
  int stage = 0, spent = -1;

  __device__ __forceinline__ void fetch_next(Walk& walk, int to) {
    ahead.settle(walk);
    if (ahead.slot < Config::kSplit) {
      walk.fetch(ahead.tile, stages + to * 2 * kTileUnits);
      ahead.tile += kPeriod;
    }
    cp_async_commit();
  }

  // Start to copy the first tiles, from index ``from`` on.
  __device__ __forceinline__ void start(Walk& walk, int from = 0) {
#pragma unroll 1
    for (int i = from; i < Config::kStages; ++i) fetch_next(walk, i);
  }

  // Start to copy those of them that end below ``limit``, and return their number.
  __device__ __forceinline__ int start_below(Walk& walk, int limit) {
    int started = 0;
#pragma unroll 1
    for (; started < Config::kStages; ++started) {
      ahead.settle(walk);
      if (ahead.slot >= Config::kSplit || (ahead.tile + 1) * kTile > limit) break;
      fetch_next(walk, started);
    }
    return started;
  }

  // Wait for the next tile, keys before values; the stage of the previous tile is refilled.
  __device__ __forceinline__ const uint4* next(Walk& walk, int team) {
    if (spent < 0) {
      cp_async_wait<Config::kStages - 1>();
    } else {
      cp_async_wait<Config::kStages - 2>();
    }
    sync_team(team);
    if (spent >= 0) fetch_next(walk, spent);
    spent = stage;
    stage = stage + 1 == Config::kStages ? 0 : stage + 1;
    return stages + spent * 2 * kTileUnits;
  }
};

// Wait for all copies except those of the last ``left`` tiles.
template <int tiles = 0>
__device__ __forceinline__ void wait_but_for(int left) {
  if constexpr (tiles < Config::kStages) {
    if (left > tiles) return wait_but_for<tiles + 1>(left);
  }
  cp_async_wait<tiles>();
}

// A CTA without work leaves its multiprocessor to the next launch immediately. Only one such CTA
// waits, so that no launch finishes before the previous ones.
__device__ __forceinline__ void wait_for_launches_in_front() {
  if (blockIdx.x + blockIdx.y + blockIdx.z == 0) pdl_wait();
}

// The first part of a CTA's shared memory.
constexpr int kTileMemoryUnits = kTeams * Config::kStages * 2 * kTileUnits +
                                 (kHasTail ? 2 * kTailSlots * kRowUnits : 0) +
                                 (kRows > 1 ? kQueryRows * kQueryUnits : 0);
struct TileMemory {
  uint4* ring;  // [kTeams][STAGES][keys, values], from this team's on
  uint4* tail;  // [keys, values] of kTailSlots
  uint4* queries;

  __device__ __forceinline__ TileMemory(unsigned char* shared, int team)
      : ring(reinterpret_cast<uint4*>(shared)),
        tail(ring + kTeams * Config::kStages * 2 * kTileUnits),
        queries(tail + (kHasTail ? 2 * kTailSlots * kRowUnits : 0)) {
    ring += team * Config::kStages * 2 * kTileUnits;
  }

  // The end of this part.
  __device__ __forceinline__ static unsigned char* end(unsigned char* shared) {
    return shared + 16 * kTileMemoryUnits;
  }
};

// The rows of a warp.
struct TeamRows {
  int team, first;  // of the CTA's rows
  bool has_tail;
  const uint4* tail;
};

// Attend to a tile run of a split: its shared tiles, then those of each row.
template <class Ring>
__device__ __forceinline__ void attend_chain(States& states, Walk& walk, Ring& ring,
                                             const Queries& queries, const TeamRows& mine, int slot,
                                             int chain) {
  const Rows& rows = walk.rows;
  states.clear();
  int own = mine.first, own_tile = -1;  // of a row's own tiles
  const int own_end = mine.has_tail ? min(mine.first + Config::kRows, rows.count) : 0;
  for (int tile = walk.first_tile(slot, chain);; tile += kPeriod) {
    const uint4 *keys, *values;
    int from;
    bool full = false;
    Places places = Places::in_order();
    const bool shared = walk.shares(tile);
    if (shared) {
      keys = ring.next(walk, mine.team);
      values = keys + kTileUnits;
      from = tile * kTile;
      full = from >= rows.full_first && from + kTile - 1 <= rows.full_last;
    } else if (kHasTail && walk.next_own_tile(slot, chain, own_end, own, own_tile)) {
      keys = mine.tail;
      values = keys + kTailSlots * kRowUnits;
      from = own_tile * kTile;
      places = Places::picked(walk.tail_row(own, own_tile));
    } else {
      break;
    }
    states.attend(keys, values, places, queries, from, full, [&](int row) {
      return shared ? rows.shared_span(mine.first + row) : rows.own_span(own, mine.first + row);
    });
  }
}
