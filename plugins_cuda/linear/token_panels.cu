// Tokens without a norm, in the order of panels (_device/prefill_panel.cuh).
//
//   x                 [rows, 32·K_BLOCKS] bf16, in
//   workspace_tokens  [groups of COLUMNS tokens] panels, out; zeros past K; entries past the tokens
//                     are not written
//
// Grid: one warp per 8 tokens of a panel; all of its loads are in flight at once.
#include "../_device/prefill_panel.cuh"
#include "../_device/ptx.cuh"
#include "device/config.cuh"

constexpr int kWarps = 8, kTokens = 8, kPanels = ceil_div(Config::kKBlocks, 2);

extern "C" __global__ void __launch_bounds__(kWarps * 32)
    token_panels(const uint16_t* x, unsigned char* workspace_tokens, int rows) {
  pdl_launch_dependents();
  pdl_wait();
  const int item = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int panel = item % kPanels, row = item / kPanels * kTokens + lane / 4;
  if (row >= rows) return;
  const int* words = reinterpret_cast<const int*>(
      x + static_cast<int64_t>(row) * (Config::kKBlocks * 32) + panel * kPanelColumns);
  unsigned char* group = workspace_tokens + static_cast<int64_t>(row / Config::kColumns) * kPanels *
                                                Config::kColumns * kPanelRowBytes;
  const auto word = [&](int i) { return static_cast<uint32_t>(load_l2_int(words + i)); };
  const bool whole = Config::kKBlocks % 2 == 0 || panel < kPanels - 1;
  const int chunk = lane % 4;
  const uint4 first = panel_chunk_of(word, chunk);
  const uint4 second = whole ? panel_chunk_of(word, chunk + 4) : make_uint4(0, 0, 0, 0);
  const auto place = [&](int at) {
    return reinterpret_cast<uint4*>(
        group + panel_chunk(panel, at, row % Config::kColumns, Config::kColumns));
  };
  *place(chunk) = first;
  *place(chunk + 4) = second;
}
