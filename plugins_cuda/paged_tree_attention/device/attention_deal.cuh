// The distribution of a CTA's splits over its teams, if teams have separate splits.
//
// Config: the members of attention_walk.cuh.
#pragma once

#include "attention_walk.cuh"
#include "config.cuh"

// The splits of a CTA with visible keys are numbered in order and distributed in rounds. A team
// gets a complete split. In the last round, if fewer splits are left and it takes less time, a team
// gets a tile run instead. A round is identified by the number of its first split.
struct Deal {
  static constexpr int kByChains = kTeams / kChains;  // splits of a round of tile runs
  static_assert(kTeams % kChains == 0 || kTeams < kChains, "a split's tile runs are in one round");
  int cta, ctas;        // the splits are those that equal `cta` modulo `ctas`
  int count, whole;     // the number of splits, and how many of them are distributed completely
  int wrapped, unseen;  // a window sees the first `wrapped` splits, and skips `unseen` after them

  // The rows have visible keys; `ctas` is a power of two.
  __device__ __forceinline__ Deal(const Rows& rows, int cta, int ctas) : cta(cta), ctas(ctas) {
    const int number = rows.number_of(cta, ctas), shift = 31 - __clz(ctas),
              all = Config::kSplit >> shift;
    count = min((rows.chunks() - number + ctas - 1) >> shift, all);
    const int left = count % kTeams;
    whole = left <= kByChains * (kChains - 1) ? count - left : count;
    const int from =
        Config::kWindow > 0 ? (((rows.first >> 7) + number) & (Config::kSplit - 1)) >> shift : 0;
    wrapped = Config::kWindow > 0 ? max(from + count - all, 0) : 0;
    unseen = from - wrapped;
  }

  __device__ __forceinline__ bool by_chains(int round) const {
    return round >= whole;
  }

  __device__ __forceinline__ int next(int round) const {
    return round + (by_chains(round) ? kByChains : kTeams);
  }

  __device__ __forceinline__ int slot(int number) const {
    return cta + ctas * (number < wrapped ? number : number + unseen);
  }

  // A team's part of a round: its split (SPLIT if there is none), and its range of tile runs.
  __device__ __forceinline__ int slot_of(int round, int team) const {
    const int number = round + (by_chains(round) ? team / kChains : team);
    return number < count ? slot(number) : Config::kSplit;
  }

  __device__ __forceinline__ int chain_from(int round, int team) const {
    return by_chains(round) ? team % kChains : 0;
  }

  __device__ __forceinline__ int chain_to(int round, int team) const {
    return by_chains(round) ? team % kChains + 1 : kChains;
  }
};

// A position in a team's list of shared tiles.
struct DealtTiles {
  const Deal& deal;
  int team, round, slot, chain, tile;

  __device__ __forceinline__ DealtTiles(const Deal& deal, const Walk& walk, int team)
      : deal(deal), team(team) {
    begin(walk, 0);
  }

  // Move from the end of a tile run to the next one with tiles, or past the last split.
  __device__ __forceinline__ void settle(const Walk& walk) {
    while (slot < Config::kSplit && !walk.shares(tile)) {
      if (++chain < deal.chain_to(round, team)) {
        tile = walk.first_tile(slot, chain);
      } else {
        begin(walk, deal.next(round));
      }
    }
  }

 private:
  __device__ __forceinline__ void begin(const Walk& walk, int of) {
    round = of;
    slot = deal.slot_of(round, team);
    chain = deal.chain_from(round, team);
    tile = walk.first_tile(slot, chain);
  }
};
