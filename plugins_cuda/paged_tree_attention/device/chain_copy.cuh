// Copies of the tiles of tile runs (chain_steps.cuh) to a ring, for wgmma.
//
// Config: KV_HEADS, SHARE, WIDTH, PAGE_SIZE, STAGES, WORDS, WARPGROUPS, ROW_GROUPS.
//
// WARPGROUPS / ROW_GROUPS tile runs are processed at a time. Each has separate stages and copying
// warps: stage i and warp i belong to tile run i modulo their number. The warps of a tile run
// alternate.
#pragma once

#include "chain_steps.cuh"
#include "ptx_registers.cuh"
#include "../../_device/ptx_ring.cuh"
#include "ptx_wgmma_rows.cuh"
#include "cache_tile.cuh"
#include "config.cuh"
#include "ring_count.cuh"
#include "../../_device/ring_place.cuh"
#include "pool_row.cuh"

using StageRing = Ring<Config::kStages>;

constexpr int kTileUnits = kTile * kUnits;
constexpr int kCopyWarps = 4;
constexpr int kChainsAtOnce = Config::kWarpgroups / Config::kRowGroups;
constexpr int kChainWarps = kCopyWarps / kChainsAtOnce;
constexpr int kRunKeys =
    Config::kPageSize % kTile == 0 ? kTile : Config::kPageSize;  // of a tile, in a page
constexpr bool kFewRuns = kTile % kRunKeys == 0 && kTile / kRunKeys <= 2;
constexpr int kRuns = kFewRuns ? kTile / kRunKeys : 1;
constexpr int kCopies = kTileUnits / 32, kKeysAtOnce = 32 / kUnits;  // of a lane, of a warp
constexpr int kOrders = 8 / kKeysAtOnce;  // every eighth key has the same order of units
static_assert(kCopyWarps % kChainsAtOnce == 0, "tile runs have equally many copying warps");
static_assert(kRunKeys >= kKeysAtOnce, "a page holds the keys that a warp copies at once");
static_assert(Config::kStages % kCopyWarps == 0, "a stage always has the same copying warp");
static_assert(kChains % kChainsAtOnce == 0, "tile runs end together");

struct Pool {
  const uint4* keys;
  const uint4* values;
  const int* page_table;
  const int* ancestor_bits;

  // The offset of this lane's unit of a slot's key and value; `table` is the first entry of the
  // page table.
  __device__ __forceinline__ int64_t unit_of(int table, unsigned slot, int unit) const {
    const int page = page_table[table + slot / Config::kPageSize];
    const int row = pool_row_of<Config::kKvHeads, Config::kShare, Config::kPageSize>(
        page, static_cast<int>(blockIdx.y), slot);
    return static_cast<int64_t>(row) * kUnits + unit;
  }

  // Return the slot of a position of a tile, or −1 if it is invisible to all rows.
  __device__ __forceinline__ int slot_of(int position, const ManyRows& rows,
                                         const Tiles& at) const {
    if (position > at.end() || (at.own >= 0 && position < (rows.tree_start & -kTile))) return -1;
    if (at.own < 0 || position < rows.tree_start) return position;
    const int* ancestors = ancestor_bits + rows.rows[at.own].index * Config::kWords;
    return rows.tree_start + set_bit<Config::kWords>(ancestors, position - rows.tree_start);
  }

  // Start this lane's part of the copies of a tile, values after keys. Invisible keys become zeros,
  // because a weight of 0 does not cancel NaN. `wait` returns when the stage is free.
  template <class Wait>
  __device__ __forceinline__ void copy(uint4* stage, const ManyRows& rows, const Tiles& at,
                                       const Wait& wait) const {
    const unsigned thread = thread_anew();
    const int unit = thread % kUnits, key = thread % 32 / kUnits;
    if (kFewRuns && at.own < 0 && at.from + kTile - 1 <= rows.shared_end) {
      // Keys of a page are adjacent.
      constexpr int kOfRun = kRunKeys / kKeysAtOnce;
      int64_t run[kRuns];
#pragma unroll
      for (int r = 0; r < kRuns; ++r) {
        run[r] = unit_of(rows.table, at.from + key + r * kRunKeys, unit);
      }
      wait();
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int to = panel_unit<Config::kWidth, kTile>(key + i % kOrders * kKeysAtOnce, unit) +
                       i / kOrders * 64;
        const int64_t from = run[i / kOfRun % kRuns] + i % kOfRun * kKeysAtOnce * kUnits;
        cp_async_16(stage + to, keys + from);
        cp_async_16(stage + kTileUnits + to, values + from);
      }
      return;
    }
    wait();
#pragma unroll 1
    for (int i = 0; i < kCopies; ++i) {
      const int slot = slot_of(at.from + key + i * kKeysAtOnce, rows, at);
      const int64_t from = slot >= 0 ? unit_of(rows.table, slot, unit) : 0;
      const int to = panel_unit<Config::kWidth, kTile>(key + i * kKeysAtOnce, unit);
      cp_async_16_or_zero(stage + to, keys + from, slot >= 0);
      cp_async_16_or_zero(stage + kTileUnits + to, values + from, slot >= 0);
    }
  }
};

// A copying warp: it copies every kChainWarps-th tile of its tile runs. Each copy arrives at a
// barrier when it is complete. Before wgmma reads the data, execute fence_async_shared().
struct CopyingWarp {
  StageRing& ring;
  uint4* stages;
  RingCount place;  // of this warp's next tile
  int ahead;        // tiles before it

  __device__ __forceinline__ CopyingWarp(StageRing& of, uint4* memory)
      : ring(of), stages(memory), place{number()}, ahead(number() / kChainsAtOnce) {}

  static __device__ __forceinline__ unsigned number() {
    return thread_anew() / 32 % kCopyWarps;
  }

  // Copy this warp's tiles of a split's tile runs.
  __device__ __forceinline__ void copy(const Pool& pool, const ManyRows& rows, int slot) {
    Tiles tiles(rows, slot, number() % kChainsAtOnce);
#pragma unroll 1
    do {
#pragma unroll 1
      while (tiles.advance()) {
        if (kChainWarps > 1 && --ahead >= 0) continue;
        ahead = kChainWarps - 1;
        pool.copy(stages + place.slot() * 2 * kTileUnits, rows, tiles,
                  [&] { mbarrier_wait(&ring.empty[place.slot()], place.parity() ^ 1); });
        cp_async_arrive(&ring.full[place.slot()]);
        place.passed += kCopyWarps;
      }
    } while (tiles.next_chain(kChainsAtOnce));
  }
};
