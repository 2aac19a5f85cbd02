// PagedTreeAttention with lists of slots, for whole rows.
//
//   selected       i32  [T, LISTS, held]; a list that starts with −2 is that of a whole row
//   workspace_…    see attend_split; null if SLOTS is 1
//   the rest       see kernel.cu
//
// A CTA without a whole row returns; any other is that of the plain kernel, so that these rows have
// its bits. attend_selected overwrites the results of the other rows.
#include "device/config.cuh"
#include "kernel.cu"

namespace {

constexpr int kWhole = -2;

// Whether this CTA has a whole row. The lists of the first rows are loaded at once, as if all
// sequences had equally many rows.
__device__ __forceinline__ bool any_whole(const int* row_start, const int* selected, int held) {
  const int row_cta = static_cast<int>(blockIdx.x) % Config::kRowCtas * kRows;
  const int list = Config::kLists > 1 ? blockIdx.y / Config::kShare : 0, lane = threadIdx.x % 32;
  const auto begins_with = [&](int row) {
    return selected[(static_cast<int64_t>(row) * Config::kLists + list) * held];
  };
  const int guess = static_cast<int>(blockIdx.z) * Config::kSequenceRows + row_cta + lane;
  const bool guessed = lane < kRows && guess < Config::kLaunchRows;
  const int first_entry = guessed ? begins_with(guess) : 0;
  const int begin = row_start[blockIdx.z] + row_cta, stop = row_start[blockIdx.z + 1];
  bool has_whole_row = false;
  for (int first = begin; first < stop; first += Config::kRowCtas * kRows) {
    const int row = first + lane;
    if (lane >= kRows || row >= stop) continue;
    has_whole_row = has_whole_row || (row == guess ? first_entry : begins_with(row)) == kWhole;
  }
  return __ballot_sync(kAllLanes, has_whole_row) != 0;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, Config::kCtasOfAnSm)
    attend_whole_rows(const uint32_t* q, const uint4* k_pool, const uint4* v_pool,
                      const int* page_table, const int* row_start, const int* row_slot,
                      const int* tree_start, const int* ancestor_bits, const float* sinks,
                      const int* selected, uint2* attended, int* workspace_arrivals,
                      float2* workspace_sums, float4* workspace_values, int held) {
  pdl_launch_dependents();
  pdl_wait();
  if (!any_whole(row_start, selected, held)) return;
  attend(INPUTS, attended, workspace_arrivals, workspace_sums, workspace_values);
}
