// Runs a CUDA kernel on a CPU: every thread of a block is a fiber, blocks run one after another.
//
// Barriers and warp collectives are real: a thread that arrives yields until the others have. A
// block whose threads all wait for nothing that can still happen is reported as a deadlock.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
#define __constant__ static const
#define __align__(n) alignas(n)
#define DYNAMIC_SHARED(type, name) type* const name = reinterpret_cast<type*>(emulation::shared)

struct uint2 { unsigned x, y; };
struct uint3 { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

constexpr size_t kStackBytes = 64 << 10;
constexpr size_t kSharedBytes = 256 << 10;
alignas(1024) inline unsigned char shared[kSharedBytes];

struct Fiber {
  void* stack_pointer = nullptr;
  std::vector<unsigned char> stack;
  bool done = false;
};

struct Barrier {
  int arrived = 0;
  unsigned generation = 0;
};

struct Warp {
  Barrier barrier;
  uint64_t values[2][32][8];
  unsigned alive = 0;
};

struct MbarrierState {
  int expected = 0, pending = 0;
  int64_t bytes = 0;
  unsigned phase = 0;
};

inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline Barrier named[16];
inline std::map<void*, MbarrierState> mbarriers;
inline int alive_threads = 0;
inline unsigned long progress = 0;
inline unsigned current = 0;
inline void* scheduler_stack = nullptr;
inline void (*body)(void*) = nullptr;
inline void* body_argument = nullptr;

#if !defined(__x86_64__)
#error "the kernel emulator switches stacks on x86-64 only"
#endif
// Saves the callee-saved registers on the old stack, and takes them from the new one.
extern "C" void emulation_switch(void** save, void* restore);
asm(R"(
.text
.weak emulation_switch
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

inline void yield() {
  emulation_switch(&fibers[current].stack_pointer, scheduler_stack);
}

// Those that wait may be all that is left.
inline void release(Barrier& barrier, int threads) {
  if (barrier.arrived == 0 || barrier.arrived < threads) return;
  barrier.arrived = 0;
  ++barrier.generation;
}

inline void fiber_main() {
  body(body_argument);
  Warp& warp = warps[current / 32];
  fibers[current].done = true;
  --alive_threads;
  warp.alive &= ~(1u << (current % 32));
  release(named[0], alive_threads);
  release(warp.barrier, __builtin_popcount(warp.alive));
  ++progress;
  for (;;) yield();
}

inline void start(Fiber& fiber) {
  fiber.stack.resize(kStackBytes);
  fiber.done = false;
  auto top = reinterpret_cast<uintptr_t>(fiber.stack.data() + kStackBytes) & ~uintptr_t{15};
  // After the six pops, `ret` takes the entry; the stack is then 8 past a multiple of 16.
  auto* slots = reinterpret_cast<void**>(top) - 8;
  std::memset(slots, 0, 8 * sizeof(void*));
  slots[6] = reinterpret_cast<void*>(&fiber_main);
  fiber.stack_pointer = slots;
}

inline void wait_for(Barrier& barrier, int threads) {
  const unsigned generation = barrier.generation;
  ++progress;
  if (++barrier.arrived >= threads) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  while (barrier.generation == generation) yield();
}

// Every lane gives a value and sees the values of all.
template <typename T>
struct Exchange {
  explicit Exchange(const T& mine) {
    static_assert(sizeof(T) <= 64);
    Warp& warp = warps[current / 32];
    slot_ = warp.values[warp.barrier.generation & 1];
    std::memcpy(slot_[current % 32], &mine, sizeof(T));
    wait_for(warp.barrier, __builtin_popcount(warp.alive));
  }
  T of(unsigned lane) const {
    T value;
    std::memcpy(&value, slot_[lane & 31], sizeof(T));
    return value;
  }

 private:
  uint64_t (*slot_)[8];
};

// 0, or 1 where the block can make no progress any more.
inline int run_block(unsigned threads) {
  std::memset(shared, 0xFF, kSharedBytes);
  fibers.resize(threads);
  warps.assign((threads + 31) / 32, Warp{});
  for (auto& barrier : named) barrier = Barrier{};
  mbarriers.clear();
  alive_threads = static_cast<int>(threads);
  for (unsigned i = 0; i < threads; ++i) {
    start(fibers[i]);
    warps[i / 32].alive |= 1u << (i % 32);
  }
  while (alive_threads > 0) {
    const unsigned long before = progress;
    for (current = 0; current < threads; ++current) {
      if (fibers[current].done) continue;
      threadIdx = {current, 0, 0};
      emulation_switch(&scheduler_stack, fibers[current].stack_pointer);
    }
    if (progress == before) return 1;
  }
  return 0;
}

template <typename... Parameters>
int launch(void (*kernel)(Parameters...), const unsigned* grid, unsigned block, void** arguments) {
  struct Call {
    void (*kernel)(Parameters...);
    void** arguments;
  } call{kernel, arguments};
  body = [](void* pointer) {
    auto* call = static_cast<Call*>(pointer);
    [&]<size_t... index>(std::index_sequence<index...>) {
      call->kernel(*static_cast<std::remove_const_t<Parameters>*>(call->arguments[index])...);
    }(std::index_sequence_for<Parameters...>{});
  };
  body_argument = &call;
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {block, 1, 1};
  for (unsigned z = 0; z < grid[2]; ++z)
    for (unsigned y = 0; y < grid[1]; ++y)
      for (unsigned x = 0; x < grid[0]; ++x) {
        blockIdx = {x, y, z};
        if (run_block(block)) return 1;
      }
  return 0;
}

}  // namespace emulation

inline void __syncthreads() { emulation::wait_for(emulation::named[0], emulation::alive_threads); }
inline void __syncwarp(unsigned = 0xFFFFFFFFu) { emulation::Exchange<int> all(0); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) { emulation::yield(); }
inline void __trap() { std::abort(); }

template <typename T>
T __shfl_sync(unsigned, T value, int lane, int width = 32) {
  const int own = emulation::current % 32;
  return emulation::Exchange<T>(value).of((own & ~(width - 1)) | (lane & (width - 1)));
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask, int width = 32) {
  const int own = emulation::current % 32, other = own ^ mask;
  const emulation::Exchange<T> all(value);
  return other / width == own / width ? all.of(other) : value;
}
template <typename T>
T __shfl_down_sync(unsigned, T value, int delta, int width = 32) {
  const int own = emulation::current % 32, other = own + delta;
  const emulation::Exchange<T> all(value);
  return other / width == own / width ? all.of(other) : value;
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int delta, int width = 32) {
  const int own = emulation::current % 32, other = own - delta;
  const emulation::Exchange<T> all(value);
  return other >= 0 && other / width == own / width ? all.of(other) : value;
}
inline unsigned __ballot_sync(unsigned, bool predicate) {
  const unsigned alive = emulation::warps[emulation::current / 32].alive;
  const emulation::Exchange<int> all(predicate ? 1 : 0);
  unsigned bits = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    if ((alive >> lane & 1) && all.of(lane)) bits |= 1u << lane;
  return bits;
}
inline bool __any_sync(unsigned mask, bool predicate) { return __ballot_sync(mask, predicate) != 0; }
inline bool __all_sync(unsigned mask, bool predicate) { return __ballot_sync(mask, !predicate) == 0; }
inline int __syncthreads_or(int predicate) {
  static int any;
  if (emulation::current == 0) any = 0;
  __syncthreads();
  if (predicate) any = 1;
  __syncthreads();
  const int result = any;
  __syncthreads();
  return result;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((static_cast<uint64_t>(a) * b) >> 32);
}
inline unsigned __brev(unsigned x) {
  unsigned y = 0;
  for (int i = 0; i < 32; ++i) y |= (x >> i & 1u) << (31 - i);
  return y;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
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
inline float __uint_as_float(unsigned x) { float y; std::memcpy(&y, &x, 4); return y; }
inline unsigned __float_as_uint(float x) { unsigned y; std::memcpy(&y, &x, 4); return y; }
inline float __int_as_float(int x) { float y; std::memcpy(&y, &x, 4); return y; }
inline int __float_as_int(float x) { int y; std::memcpy(&y, &x, 4); return y; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
template <typename T> T __ldg(const T* p) { return *p; }
template <typename T> constexpr T min(T a, T b) { return b < a ? b : a; }
template <typename T> constexpr T max(T a, T b) { return a < b ? b : a; }

template <typename T> T atomicAdd(T* p, T v) { T old = *p; *p = old + v; return old; }
template <typename T> T atomicMax(T* p, T v) { T old = *p; if (old < v) *p = v; return old; }
template <typename T> T atomicMin(T* p, T v) { T old = *p; if (v < old) *p = v; return old; }
template <typename T> T atomicOr(T* p, T v) { T old = *p; *p = old | v; return old; }
template <typename T> T atomicAnd(T* p, T v) { T old = *p; *p = old & v; return old; }
template <typename T> T atomicExch(T* p, T v) { T old = *p; *p = v; return old; }
template <typename T> T atomicCAS(T* p, T c, T v) { T old = *p; if (old == c) *p = v; return old; }
inline unsigned atomicInc(unsigned* p, unsigned top) {
  unsigned old = *p;
  *p = old >= top ? 0 : old + 1;
  return old;
}

// ---- the functions of _device/ptx.cuh ------------------------------------------------------

inline void pdl_launch_dependents() {}
inline void pdl_wait() {}
inline uint4 load_constant16(const void* p) { uint4 v; std::memcpy(&v, p, 16); return v; }
inline uint4 load_l2_16(const void* p) { uint4 v; std::memcpy(&v, p, 16); return v; }
inline float load_l2_float(const float* p) { return *p; }
inline int load_l2_int(const int* p) { return *p; }
inline float exp2_fast(float x) { return std::exp2(x); }
inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(p) - emulation::shared);
}

namespace emulation {
inline float bf16_half(uint32_t pair, int half) {
  return __uint_as_float(half ? pair & 0xFFFF0000u : pair << 16);
}
struct MmaOperands { uint32_t a[4]; uint32_t b[2]; };
}  // namespace emulation

inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  using namespace emulation;
  MmaOperands mine;
  std::memcpy(mine.a, a, sizeof(a));
  std::memcpy(mine.b, b, sizeof(b));
  const Exchange<MmaOperands> all(mine);
  const unsigned g = current % 32 / 4, t = current % 4;
  for (int i = 0; i < 4; ++i) {
    const unsigned row = g, column = 2 * t + i % 2;
    float sum = d[i];
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned lane = k % 8 / 2, half = k % 2, upper = k / 8;
      const float left = bf16_half(all.of(4 * row + lane).a[2 * upper + i / 2], half);
      const float right = bf16_half(all.of(4 * column + lane).b[upper], half);
      sum += left * right;
    }
    d[i] = sum;
  }
}

inline void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  const emulation::Exchange<const void*> rows(row);
  const unsigned lane = emulation::current % 32;
  for (unsigned m = 0; m < 4; ++m)
    std::memcpy(&r[m], static_cast<const unsigned char*>(rows.of(8 * m + lane / 4)) + lane % 4 * 4, 4);
  __syncwarp();
}
inline void ldmatrix_x4_transposed(uint32_t (&r)[4], const void* row) {
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

inline void cp_async_16(void* s, const void* g) { std::memcpy(s, g, 16); }
inline void cp_async_16_or_zero(void* s, const void* g, bool valid) {
  if (valid) std::memcpy(s, g, 16); else std::memset(s, 0, 16);
}
inline void cp_async_commit() {}
template <int pending> void cp_async_wait() {}

using Mbarrier = uint64_t;
namespace emulation {
inline void settle(MbarrierState& state) {
  ++progress;
  if (state.pending == 0 && state.bytes == 0) {
    state.phase ^= 1;
    state.pending = state.expected;
  }
}
}  // namespace emulation
inline void mbarrier_init(Mbarrier* b, int arrivals) {
  emulation::mbarriers[b] = {arrivals, arrivals, 0, 0};
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(Mbarrier* b) {
  auto& state = emulation::mbarriers.at(b);
  --state.pending;
  emulation::settle(state);
}
inline void mbarrier_expect_bytes(Mbarrier* b, uint32_t bytes) {
  auto& state = emulation::mbarriers.at(b);
  state.bytes += bytes;
  --state.pending;
  emulation::settle(state);
}
inline void mbarrier_wait(Mbarrier* b, uint32_t parity) {
  auto& state = emulation::mbarriers.at(b);
  while (state.phase == parity) emulation::yield();
}
inline void bulk_copy_to_shared(void* s, const void* g, uint32_t bytes, Mbarrier* b) {
  if (bytes % 16 || reinterpret_cast<uintptr_t>(g) % 16 || reinterpret_cast<uintptr_t>(s) % 16) {
    std::fprintf(stderr, "bulk copy of %u bytes is not aligned to 16\n", bytes);
    std::abort();
  }
  std::memcpy(s, g, bytes);
  auto& state = emulation::mbarriers.at(b);
  state.bytes -= bytes;
  emulation::settle(state);
}
inline void fence_async_shared() {}
inline void named_barrier_sync(int id, int threads) {
  emulation::wait_for(emulation::named[id], threads);
}
inline void named_barrier_arrive(int id, int threads) {
  auto& barrier = emulation::named[id];
  ++emulation::progress;
  if (++barrier.arrived >= threads) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
}
