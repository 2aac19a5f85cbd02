// Normalized tokens as fragments or panels, for kernels in which CTAs split K.
//
//   x                 [T, 32·K_BLOCKS] bf16, in
//   logit_rows        [rows] int32, in: the rows of x to normalize; null without HAS_ROWS: all
//   norm              [32·K_BLOCKS] bf16, in, constant
//   workspace_tokens  [groups of 8·TOKEN_TILES tokens][SLICES · blocks of a slice][TOKEN_TILES]
//                     [lane] 16 bytes, out; with PANELS [groups of 8·TOKEN_TILES tokens] panels
//                     (_device/prefill_panel.cuh). Entries past the tokens, and the half of a panel
//                     past K, are not written, because they are not used
//
// Grid: one CTA for TOKENS of 8 tokens, with a warp per slice of the columns. The order of sums is
// that of kernels that normalize tokens themselves. A CTA has few tokens, because its time is that
// of the reads and writes of one SM; lanes without a token cost nothing.
#include "../_device/prefill_panel.cuh"
#include "../_device/token_fragments.cuh"
#include "device/config.cuh"

using Fragments = TokenFragments<Config::kKBlocks, Config::kSlices, 1>;
constexpr int kWidth = Config::kKBlocks * 32;
static_assert(kTokensPerTile % Config::kTokens == 0, "a CTA's tokens are in one tile");
static_assert(Config::kSharedBytes == Fragments::kBytes + Fragments::kNormBytes,
              "as the launch says");

extern "C" __global__ void __launch_bounds__(Config::kSlices * 32)
    normed_tokens(const uint16_t* x, const int* logit_rows, const uint16_t* norm,
                  unsigned char* workspace_tokens, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  pdl_launch_dependents();
  Fragments::fetch_norm(shared + Fragments::kBytes, norm);
  cp_async_commit();
  pdl_wait();
  const Fragments fragments(shared);
  const int first = blockIdx.x * Config::kTokens, live = min(Config::kTokens, rows - first);
  fragments.fetch(live, [&](int token) {
    const int row = Config::kHasRows ? load_l2_int(logit_rows + first + token) : first + token;
    return x + static_cast<int64_t>(row) * kWidth;
  });
  cp_async_commit();
  cp_async_wait<0>();
  __syncwarp();
  fragments.norm<static_cast<NormRounding>(Config::kNormRounding)>(
      shared + Fragments::kBytes, static_cast<float>(Config::kEps));
  constexpr int kSliceBlocks = Fragments::kSliceBlocks;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int token = first + lane / 4, t = lane % 4;
  if constexpr (Config::kPanels != 0) {
    constexpr int kPanels = ceil_div(Config::kKBlocks, 2),
                  kRows = kTokensPerTile * Config::kTokenTiles;
    unsigned char* panels =
        workspace_tokens + static_cast<int64_t>(token / kRows) * kPanels * kRows * kPanelRowBytes;
    __syncwarp();
    if (lane / 4 >= live) return;
#pragma unroll
    for (int b = 0; b < kSliceBlocks; ++b) {
      const int block = warp * kSliceBlocks + b;
      if (block >= Config::kKBlocks) break;
      // A pair from each of the four lanes of the token.
      const uint32_t* of_token = reinterpret_cast<const uint32_t*>(fragments.at(block, 0) - t) + t;
      *reinterpret_cast<uint4*>(panels +
                                panel_chunk(block / 2, block % 2 * 4 + t, token % kRows, kRows)) =
          make_uint4(of_token[0], of_token[4], of_token[8], of_token[12]);
    }
  } else {
    if (lane / 4 >= live) return;
    const int tile = token / kTokensPerTile, place = token % kTokensPerTile * 4 + t;
#pragma unroll
    for (int b = 0; b < kSliceBlocks; ++b) {
      const int block = warp * kSliceBlocks + b;
      if (block >= Config::kKBlocks) break;
      const int64_t at =
          (static_cast<int64_t>(tile / Config::kTokenTiles) * Config::kSlices * kSliceBlocks +
           block) *
              Config::kTokenTiles +
          tile % Config::kTokenTiles;
      *reinterpret_cast<uint4*>(workspace_tokens + at * kFragmentBytes + place * 16) =
          *fragments.at(block, 0);
    }
  }
}
