// RankAdvance: adds the rounds of a finished program to the count.
//
//   state  [2] int32, in and out: rounds before this program; the limit of a wait, unchanged
//
// One thread. After griddepcontrol.wait, all launches that read the count have finished.
#include "../_device/ptx.cuh"

extern "C" __global__ void advance_rounds(int* state, int rounds) {
  pdl_launch_dependents();
  pdl_wait();
  // Unsigned: the count wraps.
  state[0] =
      static_cast<int>(static_cast<uint32_t>(load_l2_int(state)) + static_cast<uint32_t>(rounds));
}
