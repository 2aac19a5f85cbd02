// Words in the memory of other GPUs: 64 bits with a value and its round number, which become
// visible together.
#pragma once

#include "types.cuh"

struct WordPair {
  uint64_t first, second;
};

#ifdef SPECBUILD_EMULATE

void store_words(uint64_t* address, uint64_t first, uint64_t second);
WordPair load_words(const uint64_t* address);
uint64_t nanoseconds();
void trap();

#else

// Store two words at a multiple of 16 bytes. The memory model guarantees that no word tears: a
// vector access is a set of scalar accesses, here of 64 bits each. It does not guarantee their
// order.
__device__ __forceinline__ void store_words(uint64_t* address, uint64_t first, uint64_t second) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(address), "l"(first),
               "l"(second)
               : "memory");
}

__device__ __forceinline__ WordPair load_words(const uint64_t* address) {
  WordPair words;
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(words.first), "=l"(words.second)
               : "l"(address)
               : "memory");
  return words;
}

// Read the clock that all multiprocessors of a GPU share.
__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// Abort the kernel; the CUDA context is lost.
__device__ __forceinline__ void trap() {
  asm volatile("trap;");
}

#endif
