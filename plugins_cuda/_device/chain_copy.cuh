// Copies of the tiles of chains (chain_steps.cuh) into a ring, for wgmma.
//
// Constants of the kernel: KV_HEADS, WIDTH, PAGE_SIZE, STAGES, WORDS.
#pragma once

#include "attention_tile.cuh"
#include "chain_steps.cuh"
#include "ring_place.cuh"

constexpr int kUnits = WIDTH / 8;  // of 16 bytes, in a row of a tile
constexpr int kTileUnits = kTile * kUnits;
constexpr int kCopyWarps = 4;
constexpr int kBehind = 2;  // tiles of a warp whose copies are under way while one is given
constexpr int kCopies = kTileUnits / 32, kKeysAtOnce = 32 / kUnits;  // of a lane, of a warp
static_assert(2 * kKeysAtOnce == 8, "every eighth key has its units in the same order");
static_assert(STAGES % kCopyWarps == 0, "a stage is always the same copying warp's");
static_assert(kBehind + 1 < STAGES / kCopyWarps, "what is under way leaves a stage free");

struct Pool {
  const uint4* keys;
  const uint4* values;
  const int* page_table;
  const int* ancestor_bits;
  int table;  // of this sequence and KV head: its first entry

  // Where this lane's unit of a slot's key, and of its value, stands.
  __device__ __forceinline__ int64_t unit_of(int slot, int unit) const {
    const int page = page_table[table + slot / PAGE_SIZE];
    const int row = (page * KV_HEADS + static_cast<int>(blockIdx.y)) * PAGE_SIZE + slot % PAGE_SIZE;
    return static_cast<int64_t>(row) * kUnits + unit;
  }

  // The slot of a position of a tile, −1 where no row sees it.
  __device__ __forceinline__ int slot_of(int position, const ManyRows& rows,
                                         const Tiles& at) const {
    if (position > at.end() || (at.own >= 0 && position < (rows.tree_start & -kTile))) return -1;
    if (at.own < 0 || position < rows.tree_start) return position;
    const int* ancestors = ancestor_bits + rows.rows[at.own].index * WORDS;
    return rows.tree_start + set_bit<WORDS>(ancestors, position - rows.tree_start);
  }

  // Starts this lane's part of the copies of a tile, values behind keys; zeros for what no row
  // sees, since a weight of 0 does not silence a NaN. `wait` returns once the stage is free.
  template <class Wait>
  __device__ __forceinline__ void copy(uint4* stage, const ManyRows& rows, const Tiles& at,
                                       const Wait& wait) const {
    const int unit = threadIdx.x % kUnits, key = threadIdx.x % 32u / kUnits;
    if (PAGE_SIZE % kTile == 0 && at.own < 0 && at.from + kTile - 1 <= rows.shared_end) {
      // Keys of a page stand one after the other; every eighth has its units in the same order.
      const int64_t from = unit_of(at.from + key, unit);
      wait();
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int to = tile_unit<WIDTH>(key + i % 2 * kKeysAtOnce, unit) + i / 2 * 8 * kUnits;
        cp_async_16(stage + to, keys + from + i * kKeysAtOnce * kUnits);
        cp_async_16(stage + kTileUnits + to, values + from + i * kKeysAtOnce * kUnits);
      }
      return;
    }
    wait();
#pragma unroll 1
    for (int i = 0; i < kCopies; ++i) {
      const int slot = slot_of(at.from + key + i * kKeysAtOnce, rows, at);
      const int64_t from = slot >= 0 ? unit_of(slot, unit) : 0;
      const int to = tile_unit<WIDTH>(key + i * kKeysAtOnce, unit);
      cp_async_16_or_zero(stage + to, keys + from, slot >= 0);
      cp_async_16_or_zero(stage + kTileUnits + to, values + from, slot >= 0);
    }
  }
};

// A copying warp: every fourth tile of a slot's chains. A tile is given to the consumers once the
// copies of kBehind more are under way.
__device__ __forceinline__ void produce(const Pool& pool, const ManyRows& rows, int slot,
                                        Ring& ring, uint4* stages) {
  int ahead = static_cast<int>(threadIdx.x) / 32 % kCopyWarps;  // tiles to this warp's next
  RingPlace place{ahead};
  int given = ahead, under_way = 0;  // the stage that is given next
  const auto give = [&] {
    fence_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&ring.full[given]);
    given = given + kCopyWarps < STAGES ? given + kCopyWarps : given + kCopyWarps - STAGES;
    --under_way;
  };
#pragma unroll 1
  for (int chain = 0; chain < kChains; ++chain) {
    Tiles tiles(rows, slot, chain);
#pragma unroll 1
    while (tiles.advance()) {
      if (--ahead >= 0) continue;
      ahead = kCopyWarps - 1;
      pool.copy(stages + place.slot * 2 * kTileUnits, rows, tiles,
                [&] { mbarrier_wait(&ring.empty[place.slot], place.parity ^ 1); });
      cp_async_commit();
      place.advance(kCopyWarps);
      if (under_way++ < kBehind) continue;
      cp_async_wait<kBehind>();
      give();
    }
  }
  cp_async_wait<0>();
  while (under_way > 0) give();
}
