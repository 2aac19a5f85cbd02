// Runs the threads of a CUDA kernel on a CPU: every thread of a block is a fiber, blocks run one
// after another.
//
// Barriers and warp collectives are real: a thread that arrives yields until the others have. A
// block whose threads all wait for nothing that can still happen is reported as a deadlock.
#include "emulator.h"

#include <cstdio>

uint3 threadIdx, blockIdx, blockDim, gridDim;

#if !defined(__x86_64__)
#error "the kernel emulator switches stacks on x86-64 only"
#endif
// Saves the callee-saved registers on the old stack, and takes them from the new one.
extern "C" void emulation_switch(void** save, void* restore);
asm(R"(
.text
.globl emulation_switch
emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace emulation {

alignas(1024) unsigned char shared[kSharedBytes];
unsigned current = 0;
std::vector<Fiber> fibers;
std::vector<Warp> warps;
Barrier named[16];
std::map<void*, MbarrierState> mbarriers;
int alive_threads = 0, counted = 0;
unsigned long progress = 0;
Grid grid;

namespace {

constexpr size_t kStackBytes = 64 << 10;
// Stacks begin at other places of their pages: else all of them want the same lines of the caches.
constexpr size_t kColours = 64, kColourBytes = 192;

void* scheduler_stack = nullptr;
bool stops_at_wait = false;
bool interleaves = false;
unsigned stopped_block[3] = {0, 0, 0};

}  // namespace

void yield() {
  emulation_switch(&fibers[current].stack_pointer, scheduler_stack);
}

namespace {

// Lets the others run until the number is another one.
void wait_while(const unsigned& number, unsigned same) {
  fibers[current].waits_for = &number;
  fibers[current].waits_until_not = same;
  while (number == same) yield();
  fibers[current].waits_for = nullptr;
}

// Those that wait may be all that is left.
void release(Barrier& barrier, int threads) {
  if (barrier.arrived == 0 || barrier.arrived < threads) return;
  barrier.arrived = 0;
  ++barrier.generation;
}

}  // namespace

[[noreturn]] void leave() {
  Warp& warp = warps[current / 32];
  fibers[current].done = true;
  --alive_threads;
  warp.alive &= ~(1u << (current % 32));
  release(named[0], alive_threads);
  release(warp.barrier, __builtin_popcount(warp.alive));
  ++progress;
  for (;;) yield();
}

namespace {

void fiber_main() {
  grid.body(grid.argument);
  leave();
}

void start(Fiber& fiber, unsigned number) {
  fiber.stack.resize(kStackBytes + kColours * kColourBytes);
  fiber.done = false;
  fiber.waits_for = nullptr;
  const size_t colour = number % kColours * kColourBytes;
  auto top = reinterpret_cast<uintptr_t>(fiber.stack.data() + kStackBytes + colour) & ~uintptr_t{15};
  // After the six pops, `ret` takes the entry; the stack is then 8 past a multiple of 16.
  auto* slots = reinterpret_cast<void**>(top) - 8;
  std::memset(slots, 0, 8 * sizeof(void*));
  slots[6] = reinterpret_cast<void*>(&fiber_main);
  fiber.stack_pointer = slots;
}

void wait_for(Barrier& barrier, int threads) {
  const unsigned generation = barrier.generation;
  ++progress;
  if (++barrier.arrived >= threads) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  wait_while(barrier.generation, generation);
}

void settle(MbarrierState& state) {
  ++progress;
  if (state.pending == 0 && state.bytes == 0) {
    state.phase ^= 1;
    state.pending = state.expected;
  }
}

}  // namespace

void begin_block(uint3 place) {
  const unsigned threads = grid.block;
  gridDim = {grid.size[0], grid.size[1], grid.size[2]};
  blockDim = {threads, 1, 1};
  blockIdx = place;
  std::memset(shared, 0xFF, kSharedBytes);
  fibers.resize(threads);
  warps.assign((threads + 31) / 32, Warp{});
  for (auto& barrier : named) barrier = Barrier{};
  mbarriers.clear();
  alive_threads = static_cast<int>(threads);
  for (unsigned i = 0; i < threads; ++i) {
    start(fibers[i], i);
    warps[i / 32].alive |= 1u << (i % 32);
  }
}

void sweep() {
  for (current = 0; current < grid.block; ++current) {
    if (fibers[current].done || fibers[current].waits()) continue;
    threadIdx = {current, 0, 0};
    emulation_switch(&scheduler_stack, fibers[current].stack_pointer);
  }
}

namespace {

// 0, or 1 where the block can make no progress any more.
int run_block(uint3 place) {
  begin_block(place);
  while (alive_threads > 0) {
    const unsigned long before = progress;
    sweep();
    if (progress == before) return 1;
  }
  return 0;
}

}  // namespace

void sync_block() {
  wait_for(named[0], alive_threads);
}

const Slot* exchange(const void* mine, size_t bytes) {
  Warp& warp = warps[current / 32];
  Slot* const slots = warp.values[warp.barrier.generation & 1];
  if (bytes > 0) std::memcpy(slots[current % 32], mine, bytes);
  wait_for(warp.barrier, __builtin_popcount(warp.alive));
  return slots;
}

int run_grid(void (*body)(void*), void* argument, const unsigned* size, unsigned block) {
  const Grid launched{body, argument, {size[0], size[1], size[2]}, block};
  if (collects(launched)) return 0;
  grid = launched;
  if (stops_at_wait) {
    // Threads may wait for others that have stopped.
    run_block({stopped_block[0], stopped_block[1], stopped_block[2]});
    return 0;
  }
  const unsigned blocks = size[0] * size[1] * size[2];
  for (unsigned i = 0; i < blocks; ++i) {
    const unsigned last = blocks - 1 - i;
    const uint3 interleaved{last / size[2] / size[1], last / size[2] % size[1], last % size[2]};
    const uint3 in_order{i % size[0], i / size[0] % size[1], i / size[0] / size[1]};
    if (run_block(interleaves ? interleaved : in_order)) return 1;
  }
  return 0;
}

}  // namespace emulation

// Blocks run from the last to the first, those of a z and y in turn: what they count together by
// mistake is not zero again when the next ones begin.
extern "C" void emulation_interleave(int interleaves) {
  emulation::interleaves = interleaves != 0;
}

extern "C" void emulation_stop_at_wait(int stops) {
  emulation::stops_at_wait = stops != 0;
  for (unsigned& place : emulation::stopped_block) place = 0;
}
// Which block runs until then, instead of the first.
extern "C" void emulation_stopped_block(unsigned x, unsigned y, unsigned z) {
  emulation::stopped_block[0] = x;
  emulation::stopped_block[1] = y;
  emulation::stopped_block[2] = z;
}

void pdl_wait() {
  if (emulation::stops_at_wait) emulation::leave();
}

unsigned __ballot_sync(unsigned, bool predicate) {
  const unsigned alive = emulation::warps[emulation::current / 32].alive;
  const emulation::Exchange<int> all(predicate ? 1 : 0);
  unsigned bits = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    if ((alive >> lane & 1) && all.of(lane)) bits |= 1u << lane;
  return bits;
}
int __syncthreads_count(int predicate) {
  int& count = emulation::counted;
  if (emulation::current == 0) count = 0;
  __syncthreads();
  if (predicate) ++count;
  __syncthreads();
  const int result = count;
  __syncthreads();
  return result;
}
int __syncthreads_or(int predicate) {
  return __syncthreads_count(predicate) > 0;
}

unsigned __brev(unsigned x) {
  unsigned y = 0;
  for (int i = 0; i < 32; ++i) y |= (x >> i & 1u) << (31 - i);
  return y;
}
unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = a | static_cast<uint64_t>(b) << 32;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned pick = selector >> (4 * i) & 0xF;
    unsigned byte = static_cast<unsigned>(bytes >> (8 * (pick & 7))) & 0xFF;
    if (pick & 8) byte = byte & 0x80 ? 0xFF : 0;
    out |= byte << (8 * i);
  }
  return out;
}

namespace emulation {
float f16_half(uint32_t pair, int half) {
  const uint32_t bits = pair >> 16 * half & 0xFFFFu, sign = (bits & 0x8000u) << 16;
  const uint32_t plain = bits & 0x7FFFu;
  float value = plain * 0x1p-24f;  // below 2^-14
  if (plain >= 0x7C00u) value = __uint_as_float(0x7F800000u | (plain & 0x3FFu) << 13);
  else if (plain >= 0x400u) value = __uint_as_float((plain << 13) + (112u << 23));
  return __uint_as_float(__float_as_uint(value) | sign);
}

template <class Half>
void multiply_16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const Half& half_of) {
  struct Operands { uint32_t a[4]; uint32_t b[2]; } mine;
  std::memcpy(mine.a, a, sizeof(a));
  std::memcpy(mine.b, b, sizeof(b));
  const Exchange<Operands> all(mine);
  const unsigned g = current % 32 / 4, t = current % 4;
  for (int i = 0; i < 4; ++i) {
    const unsigned row = g, column = 2 * t + i % 2;
    float sum = d[i];
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned lane = k % 8 / 2, half = k % 2, upper = k / 8;
      const float left = half_of(all.of(4 * row + lane).a[2 * upper + i / 2], half);
      const float right = half_of(all.of(4 * column + lane).b[upper], half);
      sum += left * right;
    }
    d[i] = sum;
  }
}
}  // namespace emulation

void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emulation::multiply_16(d, a, b, emulation::bf16_half);
}
void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emulation::multiply_16(d, a, b, emulation::f16_half);
}

void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  const emulation::Exchange<const void*> rows(row);
  const unsigned lane = emulation::current % 32;
  for (unsigned m = 0; m < 4; ++m)
    std::memcpy(&r[m], static_cast<const unsigned char*>(rows.of(8 * m + lane / 4)) + lane % 4 * 4, 4);
  __syncwarp();
}
void ldmatrix_x4_transposed(uint32_t (&r)[4], const void* row) {
  const emulation::Exchange<const void*> rows(row);
  const unsigned lane = emulation::current % 32;
  for (unsigned m = 0; m < 4; ++m) {
    uint16_t pair[2];
    for (unsigned i = 0; i < 2; ++i)
      std::memcpy(&pair[i], static_cast<const unsigned char*>(rows.of(8 * m + lane % 4 * 2 + i)) +
                                lane / 4 * 2, 2);
    r[m] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
  }
  __syncwarp();
}

void mbarrier_init(Mbarrier* b, int arrivals) {
  emulation::mbarriers[b] = {arrivals, arrivals, 0, 0};
}
void mbarrier_arrive(Mbarrier* b) {
  auto& state = emulation::mbarriers.at(b);
  --state.pending;
  emulation::settle(state);
}
void mbarrier_expect_bytes(Mbarrier* b, uint32_t bytes) {
  auto& state = emulation::mbarriers.at(b);
  state.bytes += bytes;
  --state.pending;
  emulation::settle(state);
}
void mbarrier_wait(Mbarrier* b, uint32_t parity) {
  auto& state = emulation::mbarriers.at(b);
  if (state.phase == parity) emulation::wait_while(state.phase, parity);
}
void bulk_copy_to_shared(void* s, const void* g, uint32_t bytes, Mbarrier* b) {
  if (bytes % 16 || reinterpret_cast<uintptr_t>(g) % 16 || reinterpret_cast<uintptr_t>(s) % 16) {
    std::fprintf(stderr, "bulk copy of %u bytes is not aligned to 16\n", bytes);
    std::abort();
  }
  std::memcpy(s, g, bytes);
  auto& state = emulation::mbarriers.at(b);
  state.bytes -= bytes;
  emulation::settle(state);
}
void named_barrier_sync(int id, int threads) {
  emulation::wait_for(emulation::named[id], threads);
}
void named_barrier_arrive(int id, int threads) {
  auto& barrier = emulation::named[id];
  ++emulation::progress;
  if (++barrier.arrived >= threads) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
}
