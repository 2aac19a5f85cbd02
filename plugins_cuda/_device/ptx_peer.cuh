// Words in the memory of other GPUs: a value and the number of its round, in 64 bits that arrive
// together.
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

// Two words, at a multiple of 16 bytes. The memory model promises that neither word tears: a vector
// is a set of scalar accesses, of 64 bits each here. It says nothing of their order.
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

// Of a clock that all of a GPU's multiprocessors share.
__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// Ends the kernel; the context is lost.
__device__ __forceinline__ void trap() {
  asm volatile("trap;");
}

#endif
