// What a CUDA kernel sees on a CPU; emulator.cpp runs its threads, wgmma.cpp their wgmmas.
//
// Hundreds of variants are compiled with it, so it includes little and instantiates little: what is
// no template and more than a line stands in those two, compiled once.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

// Inline: of a file's kernels only the one that is launched is compiled.
#define __global__ inline
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

extern uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

constexpr size_t kSharedBytes = 256 << 10;
extern unsigned char shared[kSharedBytes];
// The thread that runs, its lane the last five bits.
extern unsigned current;

// Lets the block's other threads run.
void yield();
void sync_block();

// Every lane gives up to 64 bytes; returns those of all, until the warp's exchange after the next.
using Slot = uint64_t[8];
const Slot* exchange(const void* mine, size_t bytes);

// Every lane gives a value and sees the values of all.
template <typename T>
struct Exchange {
  explicit Exchange(const T& mine) : slots_(exchange(&mine, sizeof(T))) {
    static_assert(sizeof(T) <= sizeof(Slot));
  }
  T of(unsigned lane) const {
    T value;
    std::memcpy(&value, slots_[lane & 31], sizeof(T));
    return value;
  }

 private:
  const Slot* slots_;
};

// Runs body(argument) as every thread of every block: 0, or 1 where a block can make no progress.
int run_grid(void (*body)(void*), void* argument, const unsigned* grid, unsigned block);

template <typename... Parameters>
struct Call {
  void (*kernel)(Parameters...);
  void** arguments;

  struct Made {
    Made(void (*kernel)(Parameters...), Parameters... values) { kernel(values...); }
  };
  template <typename T>
  static T take(void**& next) {
    return *static_cast<T*>(*next++);
  }
  static void run(void* self) {
    void** next = static_cast<Call*>(self)->arguments;
    // Braces, unlike parentheses, evaluate from left to right.
    Made{static_cast<Call*>(self)->kernel, take<Parameters>(next)...};
  }
};

template <typename... Parameters>
int launch(void (*kernel)(Parameters...), const unsigned* grid, unsigned block, void** arguments) {
  Call<Parameters...> call{kernel, arguments};
  return run_grid(&Call<Parameters...>::run, &call, grid, block);
}

}  // namespace emulation

inline void __syncthreads() { emulation::sync_block(); }
inline void __syncwarp(unsigned = 0xFFFFFFFFu) { emulation::exchange(nullptr, 0); }
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
unsigned __ballot_sync(unsigned mask, bool predicate);
inline bool __any_sync(unsigned mask, bool predicate) { return __ballot_sync(mask, predicate) != 0; }
inline bool __all_sync(unsigned mask, bool predicate) { return __ballot_sync(mask, !predicate) == 0; }
int __syncthreads_or(int predicate);
int __syncthreads_count(int predicate);

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((static_cast<uint64_t>(a) * b) >> 32);
}
unsigned __brev(unsigned x);
unsigned __byte_perm(unsigned a, unsigned b, unsigned selector);

// Declared one by one: <cmath> takes longer to read than most kernels.
extern "C" {
float expf(float) noexcept;
double exp(double) noexcept;
float exp2f(float) noexcept;
double exp2(double) noexcept;
float logf(float) noexcept;
double log(double) noexcept;
float log1pf(float) noexcept;
float log2f(float) noexcept;
double log2(double) noexcept;
float sqrtf(float) noexcept;
double sqrt(double) noexcept;
float fabsf(float) noexcept;
double fabs(double) noexcept;
float floorf(float) noexcept;
double floor(double) noexcept;
float ceilf(float) noexcept;
double ceil(double) noexcept;
float rintf(float) noexcept;
double rint(double) noexcept;
float fmaf(float, float, float) noexcept;
double fma(double, double, double) noexcept;
float fmaxf(float, float) noexcept;
double fmax(double, double) noexcept;
float fminf(float, float) noexcept;
double fmin(double, double) noexcept;
}
inline float __uint_as_float(unsigned x) { float y; std::memcpy(&y, &x, 4); return y; }
inline unsigned __float_as_uint(float x) { unsigned y; std::memcpy(&y, &x, 4); return y; }
inline float __int_as_float(int x) { float y; std::memcpy(&y, &x, 4); return y; }
inline int __float_as_int(float x) { int y; std::memcpy(&y, &x, 4); return y; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
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
void pdl_wait();
inline uint4 load_constant16(const void* p) { uint4 v; std::memcpy(&v, p, 16); return v; }
inline uint4 load_l2_16(const void* p) { uint4 v; std::memcpy(&v, p, 16); return v; }
inline float load_l2_float(const float* p) { return *p; }
inline int load_l2_int(const int* p) { return *p; }
inline float exp2_fast(float x) { return exp2f(x); }
inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(p) - emulation::shared);
}

namespace emulation {
inline float bf16_half(uint32_t pair, int half) {
  return __uint_as_float(half ? pair & 0xFFFF0000u : pair << 16);
}
}  // namespace emulation

void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
void ldmatrix_x4(uint32_t (&r)[4], const void* row);
void ldmatrix_x4_transposed(uint32_t (&r)[4], const void* row);

inline void cp_async_16(void* s, const void* g) { std::memcpy(s, g, 16); }
inline void cp_async_16_or_zero(void* s, const void* g, bool valid) {
  if (valid) std::memcpy(s, g, 16); else std::memset(s, 0, 16);
}
inline void cp_async_commit() {}
template <int pending> void cp_async_wait() {}

using Mbarrier = uint64_t;
void mbarrier_init(Mbarrier* b, int arrivals);
inline void mbarrier_init_fence() {}
void mbarrier_arrive(Mbarrier* b);
void mbarrier_expect_bytes(Mbarrier* b, uint32_t bytes);
void mbarrier_wait(Mbarrier* b, uint32_t parity);
void bulk_copy_to_shared(void* s, const void* g, uint32_t bytes, Mbarrier* b);
inline void bulk_copy_once_to_shared(void* s, const void* g, uint32_t bytes, Mbarrier* b) {
  bulk_copy_to_shared(s, g, bytes, b);
}
inline void fence_async_shared() {}
void named_barrier_sync(int id, int threads);
void named_barrier_arrive(int id, int threads);

// ---- of paged_tree_attention/device/ptx_registers.cuh ----------------------------------------------------------

inline unsigned thread_anew() { return threadIdx.x; }
template <class T> T* in_register(T* pointer) { return pointer; }

// ---- of _device/ptx_wgmma.cuh --------------------------------------------------------------

namespace emulation {
// A thread's part of a wgmma. It runs when it is waited for: what is read before that is stale,
// what was overwritten before that is wrong.
struct PendingWgmma {
  float* sums;
  const uint32_t* a;
  uint64_t matrix;
  int columns;
  bool adds, by_rows;     // D += or D =; B as ptx_wgmma_rows.cuh has it
  int commit;             // which one it belongs to
  uint64_t a_matrix = 0;  // where A lies in shared memory: `a` is null
};
void defer(PendingWgmma one);
void commit_wgmmas();
// Until all but the last `last` commits are done.
void wait_for_wgmmas(int last);
}  // namespace emulation
