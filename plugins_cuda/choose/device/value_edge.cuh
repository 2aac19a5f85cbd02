// Finds the value at which the largest values of a set reach a count or a mass, without a sort.
//
// Radix passes over ordered keys, eight bits each, from the highest bits. A cell of the histogram
// belongs to one lane of all warps, so lanes of a warp have no conflicts. Sums are integers, so the
// order does not affect them.
#pragma once

#include "../../_device/types.cuh"

constexpr int kEdgeDigits = 256, kEdgeWarps = 16, kEdgeThreads = kEdgeWarps * 32;
constexpr int kEdgeCells = kEdgeDigits * 32;
constexpr int kEdgeCellBytes = 2 * kEdgeCells * 4;

// The digit at which the values, summed from the highest digit down, reach a target.
struct Crossing {
  int digit;
  uint64_t count_above, mass_above;
  double weight_above;  // of the summed weights
};

// The counts and masses of every digit. It is in shared memory, like the cells.
struct EdgeHistogram {
  uint32_t* counts;  // [kEdgeCells], cell of (digit, lane)
  uint32_t* masses;  // [kEdgeCells]
  uint64_t count_at[kEdgeDigits], mass_at[kEdgeDigits];
  Crossing crossing;

  // All threads call it; the caller adds a barrier.
  __device__ void clear() {
    for (int i = threadIdx.x; i < kEdgeCells; i += kEdgeThreads) counts[i] = masses[i] = 0;
  }

  __device__ __forceinline__ void add(int digit, uint32_t mass) {
    const int cell = digit * 32 + static_cast<int>(threadIdx.x % 32);
    atomicAdd(&counts[cell], 1u);
    atomicAdd(&masses[cell], mass);
  }

  // Add the lanes' cells. The caller adds a barrier before and after.
  __device__ void sum() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int digit = warp; digit < kEdgeDigits; digit += kEdgeWarps) {
      uint64_t count = counts[digit * 32 + lane], mass = masses[digit * 32 + lane];
      for (int distance = 16; distance > 0; distance /= 2) {
        count += __shfl_xor_sync(kAllLanes, count, distance);
        mass += __shfl_xor_sync(kAllLanes, mass, distance);
      }
      if (lane == 0) {
        count_at[digit] = count;
        mass_at[digit] = mass;
      }
    }
  }

  // Return the digit at which ``weight_of(digit)``, summed from the highest digit, reaches
  // ``target``. ``target`` is positive and at most the total. All threads call it. It has a
  // barrier at the start and one at the end.
  template <typename Weight, typename Sum>
  __device__ Crossing cross(Weight weight_of, Sum target) {
    __syncthreads();
    if (threadIdx.x < 32) {
      const int lane = threadIdx.x, first = kEdgeDigits - 1 - lane * 8;
      Sum own = 0;
      uint64_t counted = 0, massed = 0;
      for (int digit = first; digit > first - 8; --digit) {
        own += weight_of(digit);
        counted += count_at[digit];
        massed += mass_at[digit];
      }
      Sum through = own;
      uint64_t count = counted, mass = massed;
      for (int distance = 1; distance < 32; distance *= 2) {
        const Sum more = __shfl_up_sync(kAllLanes, through, distance);
        const uint64_t more_count = __shfl_up_sync(kAllLanes, count, distance);
        const uint64_t more_mass = __shfl_up_sync(kAllLanes, mass, distance);
        if (lane >= distance) {
          through += more;
          count += more_count;
          mass += more_mass;
        }
      }
      // The first lane that reaches it, or the last lane if rounding makes the total smaller.
      const unsigned reached = __ballot_sync(kAllLanes, through >= target || lane == 31);
      const Sum before = __shfl_up_sync(kAllLanes, through, 1);
      if (lane == __ffs(static_cast<int>(reached)) - 1) {
        Sum above = lane == 0 ? Sum{0} : before;
        count -= counted;
        mass -= massed;
        crossing = {first, count, mass, static_cast<double>(above)};
        for (int digit = first; digit > first - 8; --digit) {
          const Sum weight = weight_of(digit);
          if (weight > 0) {
            crossing = {digit, count, mass, static_cast<double>(above)};
            if (above + weight >= target) break;
          }
          above += weight;
          count += count_at[digit];
          mass += mass_at[digit];
        }
      }
    }
    __syncthreads();
    return crossing;
  }
};

// The smallest key such that the keys from the largest down to it reach a target.
struct Edge {
  uint32_t key;
  uint64_t ties;        // number of values with this key
  uint64_t left;        // the part of the target that these must reach, at least 1
  uint64_t mass_above;  // mass of the larger keys
};

// ``scan(visit)`` calls ``visit(key, mass)`` for every element of this thread. It runs once per
// digit. The target is a mass or a number of elements.
template <typename Scan>
__device__ Edge find_edge(EdgeHistogram& histogram, const Scan& scan, uint64_t target,
                          bool by_mass) {
  Edge edge{0, 0, target, 0};
  uint32_t known = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    __syncthreads();
    histogram.clear();
    __syncthreads();
    scan([&](uint32_t key, uint32_t mass) {
      if ((key & known) == edge.key) histogram.add(key >> shift & 0xFF, mass);
    });
    __syncthreads();
    histogram.sum();
    const Crossing at = histogram.cross(
        [&](int digit) { return by_mass ? histogram.mass_at[digit] : histogram.count_at[digit]; },
        edge.left);
    edge.key |= static_cast<uint32_t>(at.digit) << shift;
    known |= 0xFFu << shift;
    edge.left -= by_mass ? at.mass_above : at.count_above;
    edge.mass_above += at.mass_above;
    edge.ties = histogram.count_at[at.digit];
  }
  return edge;
}
