// wgmma on a CPU: what it adds, and when.
#include "cuda_emulation.h"

#include <vector>

namespace emulation {
namespace {

// By thread.
std::vector<PendingWgmma> pending[1024];
int commits[1024];

struct WgmmaOperands {
  uint32_t a[4];
};

// An element of a matrix in shared memory, by the descriptor's fields as the hardware reads them.
// ``row`` is a row of A or a column of B.
float element(uint64_t matrix, unsigned row, unsigned k, bool rows_adjoin) {
  const uint64_t start = (matrix & 0x3FFF) << 4, stride = (matrix >> 32 & 0x3FFF) << 4;
  const uint64_t leading = (matrix >> 16 & 0x3FFF) << 4;
  if (matrix >> 62 != 1) std::abort();
  const uint64_t linear =
      rows_adjoin ? start + row / 64 * leading + row % 64 * 2 + k / 8 * stride + k % 8 * 128
                  : start + row / 8 * stride + row % 8 * 128 + 2 * k;
  uint16_t bits;
  std::memcpy(&bits, shared + (linear ^ (linear >> 3 & 0x70)), 2);
  return bf16_half(bits, 0);
}

void run(const PendingWgmma& one) {
  const unsigned g = current % 32 / 4, t = current % 4, warp = current / 32 % 4;
  float a[2][16];  // of rows g and g + 8
  if (one.a != nullptr) {
    WgmmaOperands mine;
    std::memcpy(mine.a, one.a, sizeof(mine.a));
    const Exchange<WgmmaOperands> all(mine);
    for (unsigned i = 0; i < 32; ++i) {
      const unsigned half = i / 16, k = i % 16;
      a[half][k] = bf16_half(all.of(4 * g + k % 8 / 2).a[k / 8 * 2 + half], k % 2);
    }
  } else {
    for (unsigned i = 0; i < 32; ++i) {
      a[i / 16][i % 16] = element(one.a_matrix, 16 * warp + g + i / 16 * 8, i % 16, false);
    }
  }
  for (int i = 0; i < one.columns / 2; ++i) {
    const unsigned half = i % 4 / 2, column = i / 4 * 8 + 2 * t + i % 2;
    float sum = one.adds ? one.sums[i] : 0.0f;
    for (unsigned k = 0; k < 16; ++k) {
      sum += a[half][k] * element(one.matrix, column, k, one.by_rows);
    }
    one.sums[i] = sum;
  }
}

}  // namespace

void defer(PendingWgmma one) {
  one.commit = commits[current];
  pending[current].push_back(one);
}

void commit_wgmmas() {
  ++commits[current];
}

void wait_for_wgmmas(int last) {
  __syncwarp();
  auto& own = pending[current];
  const int before = commits[current] - last;
  size_t done = 0;
  for (; done < own.size() && own[done].commit < before; ++done) run(own[done]);
  own.erase(own.begin(), own.begin() + done);
}

}  // namespace emulation
