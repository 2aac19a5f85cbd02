// The threads of the block that runs, for what schedules them: emulator.cpp one block, ranks.cpp one
// of each rank.
#pragma once

#include "cuda_emulation.h"

#include <map>
#include <vector>

namespace emulation {

struct Fiber {
  void* stack_pointer = nullptr;
  // While it waits: what must become another number before it runs again.
  const unsigned* waits_for = nullptr;
  unsigned waits_until_not = 0;
  bool done = false;
  std::vector<unsigned char> stack;

  bool waits() const { return waits_for != nullptr && *waits_for == waits_until_not; }
};

struct Barrier {
  int arrived = 0;
  unsigned generation = 0;
};

struct Warp {
  Barrier barrier;
  Slot values[2][32];
  unsigned alive = 0;
};

struct MbarrierState {
  int expected = 0, pending = 0;
  int64_t bytes = 0;
  unsigned phase = 0;
};

extern std::vector<Fiber> fibers;
extern std::vector<Warp> warps;
extern Barrier named[16];
extern std::map<void*, MbarrierState> mbarriers;
extern int alive_threads;
// Of __syncthreads_count.
extern int counted;
// Grows with all that may let another thread go on.
extern unsigned long progress;

// A kernel with its arguments.
struct Grid {
  void (*body)(void*);
  void* argument;
  unsigned size[3];
  unsigned block;
};
extern Grid grid;

// Makes every thread of a block ready to run.
void begin_block(uint3 place);
// Lets each of them run until it waits for something.
void sweep();
// Where every rank's launches are collected, this one is one of them.
bool collects(const Grid& launched);
// Ends the thread: its kernel is over, whatever the others do.
[[noreturn]] void leave();

}  // namespace emulation
