// Kernels of several ranks at once: each rank runs its launches one after another, a block at a time,
// and all of them take turns. Words that a rank stores for others arrive later, one by one and in
// any order.
#include "emulator.h"

#include "../../../plugins_cuda/_device/ptx_peer.cuh"

#include <utility>

// A rank's launch of a kernel.
struct RankLaunch {
  int (*entry)(const unsigned* grid, unsigned block, void** arguments);
  unsigned rank, block;
  unsigned grid[3];
  void** arguments;
};

namespace emulation {
namespace {

struct Delivery {
  uint64_t* address;
  uint64_t word;
};

// A rank's launches, and the threads of the block that it runs.
struct Rank {
  std::vector<Grid> grids;
  size_t running = 0;
  unsigned block = 0;
  bool begun = false;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier named[16];
  std::map<void*, MbarrierState> mbarriers;
  int alive_threads = 0, counted = 0;
  uint3 place{};
  std::vector<unsigned char> shared = std::vector<unsigned char>(kSharedBytes);

  bool done() const { return running == grids.size(); }

  // Exchanges its threads with those that the emulator has.
  void swap() {
    std::swap(fibers, emulation::fibers);
    std::swap(warps, emulation::warps);
    std::swap(named, emulation::named);
    std::swap(mbarriers, emulation::mbarriers);
    std::swap(alive_threads, emulation::alive_threads);
    std::swap(counted, emulation::counted);
    std::swap_ranges(shared.begin(), shared.end(), emulation::shared);
  }

  // Lets every thread of its block run once.
  void step() {
    grid = grids[running];
    swap();
    const unsigned* size = grid.size;
    if (!begun) {
      place = {block % size[0], block / size[0] % size[1], block / size[0] / size[1]};
      begin_block(place);
      begun = true;
    }
    gridDim = {size[0], size[1], size[2]};
    blockDim = {grid.block, 1, 1};
    blockIdx = place;
    sweep();
    if (emulation::alive_threads == 0) {
      begun = false;
      if (++block == size[0] * size[1] * size[2]) {
        block = 0;
        ++running;
      }
    }
    swap();
  }
};

std::vector<Rank>* ranks = nullptr;
std::vector<Delivery> under_way;
uint64_t seed = 0, clock_ns = 0;
bool delays = false, trapped = false;

unsigned drawn(unsigned below) {
  seed = seed * 6364136223846793005u + 1442695040888963407u;
  return static_cast<unsigned>(seed >> 33) % below;
}

// So many of the words that are under way arrive.
void deliver(size_t count) {
  for (; count > 0 && !under_way.empty(); --count) {
    const size_t i = drawn(static_cast<unsigned>(under_way.size()));
    *under_way[i].address = under_way[i].word;
    under_way[i] = under_way.back();
    under_way.pop_back();
    ++progress;
  }
}

// What no rank can end by itself: more turns than a poll makes between two looks at the clock.
constexpr int kIdleTurns = 1 << 14;
constexpr uint64_t kTurnNs = 10000;

int run_all() {
  for (int idle = 0; idle < kIdleTurns; ++idle) {
    const unsigned long before = progress;
    bool busy = false;
    for (Rank& rank : *ranks) {
      busy = busy || !rank.done();
      // None, one or several turns: a rank falls behind the others, and catches up.
      for (unsigned turns = drawn(3); turns > 0 && !rank.done(); --turns) rank.step();
    }
    deliver(drawn(static_cast<unsigned>(under_way.size() / 4 + 3)));
    clock_ns += kTurnNs;
    if (trapped) return 2;
    if (!busy) return 0;
    if (progress != before) idle = 0;
  }
  return 1;
}

// The launches that are still to be collected, and how running all of them ended.
const RankLaunch* next = nullptr;
const RankLaunch* end = nullptr;
int ended = 0;

// A launch's arguments live as long as its entry has not returned, so that each is collected inside
// of the one before it, and all of them run inside of the last.
void collect_next() {
  if (next == end) {
    ended = run_all();
    return;
  }
  const RankLaunch& launch = *next;
  launch.entry(launch.grid, launch.block, launch.arguments);
}

}  // namespace

bool collects(const Grid& launched) {
  if (next == end) return false;
  (*ranks)[next++->rank].grids.push_back(launched);
  collect_next();
  return true;
}

}  // namespace emulation

void store_words(uint64_t* address, uint64_t first, uint64_t second) {
  if (!emulation::delays) {
    address[0] = first, address[1] = second;
    return;
  }
  emulation::under_way.push_back({address, first});
  emulation::under_way.push_back({address + 1, second});
}

// Another rank may have its turn before; and between the two halves words may arrive.
WordPair load_words(const uint64_t* address) {
  WordPair words;
  if (emulation::delays) emulation::yield();
  words.first = address[0];
  if (emulation::delays) emulation::yield();
  words.second = address[1];
  return words;
}

uint64_t nanoseconds() {
  ++emulation::progress;
  return emulation::clock_ns;
}

void trap() {
  emulation::trapped = true;
  emulation::leave();
}

// Runs the launches of all ranks, those of a rank in order; ``seed`` says who has a turn, and when
// words arrive. 0, 1 where nothing can go on any more, 2 where a kernel gave up.
extern "C" int emulation_run_ranks(const RankLaunch* launches, unsigned count, unsigned rank_count,
                                   uint64_t seed) {
  using namespace emulation;
  std::vector<Rank> all(rank_count);
  ranks = &all;
  next = launches, end = launches + count;
  delays = true, trapped = false;
  emulation::seed = seed;
  collect_next();
  deliver(under_way.size());
  ranks = nullptr;
  delays = false;
  return ended;
}
