// How a CTA whose teams have slots of their own deals these to them.
//
// Config: those of attention_walk.cuh.
#pragma once

#include "attention_walk.cuh"
#include "config.cuh"

// The slots of a CTA that its rows see keys of, numbered in their order, are dealt in rounds: a
// whole slot to each team; in the end, where fewer are left and their tiles take less time so, a
// chain to each team. A round is known by the number of its first slot.
struct Deal {
  static constexpr int kByChains = kTeams / kChains;  // slots of a round that is dealt by chains
  static_assert(kTeams % kChains == 0 || kTeams < kChains, "a slot's chains have teams of a round");
  int cta, ctas;        // the slots are those that are `cta` modulo `ctas`
  int count, whole;     // so many, of which so many in front are dealt as whole ones
  int wrapped, unseen;  // a window may see so many slots in front, and not so many behind them

  // The rows see keys of some slot; `ctas` is a power of two.
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

  // What a team has of a round: its slot, SPLIT where there is none for it, and its chains.
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

// A place in the list of shared tiles that a team is dealt.
struct DealtTiles {
  const Deal& deal;
  int team, round, slot, chain, tile;

  __device__ __forceinline__ DealtTiles(const Deal& deal, const Walk& walk, int team)
      : deal(deal), team(team) {
    begin(walk, 0);
  }

  // From a chain's end to the next chain that has tiles, or past the last slot.
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
