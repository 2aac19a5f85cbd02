// ReplayPath: the accepted slots of a step become those that the next launch applies to states.
//
//   path          i32 [B, PATH], in, or null: the root alone
//   accepted      i32 [B], in, null with it
//   positions     i32 [T], in
//   row_start     i32 [B + 1], in
//   replay_path   i32 [B, KEPT], in and out
//   replay_count  i32 [B], in and out
//
// Grid: one warp per sequence; it reads and writes a few bytes.
#include "../_device/ptx.cuh"

CONFIG

extern "C" __global__ void __launch_bounds__(32)
    replay_path_of_rows(const int* path, const int* accepted, const int* positions,
                        const int* row_start, int* replay_path, int* replay_count) {
  pdl_launch_dependents();
  pdl_wait();
  const int b = blockIdx.x, lane = threadIdx.x;
  const int first = load_l2_int(row_start + b), last = load_l2_int(row_start + b + 1);
  if (first >= last) return;
  if (Config::kStores != 0) {
    if (lane == 0) replay_count[b] = 0;
    return;
  }
  if (load_l2_int(positions + first) == 0) return;  // padding
  const int last_accepted = accepted == nullptr ? 0 : load_l2_int(accepted + b);
  const int count = min(last_accepted + 1, Config::kPath);
  for (int i = lane; i < count; i += 32)
    replay_path[b * Config::kKept + i] =
        path == nullptr ? 0 : load_l2_int(path + b * Config::kPath + i);
  if (lane == 0) replay_count[b] = count;
}
