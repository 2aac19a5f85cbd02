// MlaAttention with rebuilt keys, for decoding, verification and drafting, with splits.
//
//   q              bf16 [T, KV_HEADS·GROUP, WIDTH], rotated
//   c_pool         bf16 [pages, 1, PAGE_SIZE, ENTRY]
//   w_k            bf16 [ENTRY, KV_HEADS, WIDTH], constant
//   b_k            bf16 [KV_HEADS, WIDTH], constant; null without HAS_BIAS
//   cos, sin       f32  [POSITIONS, WIDTH/2], constant
//   page_table     i32  [B, 1, TABLE]
//   row_start      i32  [B + 1]
//   row_slot       i32  [T]
//   tree_start     i32  [B]
//   ancestor_bits  i32  [T, WORDS]
//   selected       not used: null
//   page_position  i32  [B, TABLE], the position of each page's first slot, if VIEWED; else null
//   workspace_sums    f32  [T, KV_HEADS·GROUP, PLACES, 2], out
//   workspace_values  f32  [T, KV_HEADS·GROUP, PLACES, ENTRY], out, of places with a tile
//
// Grid (CONTEXT_CTAS, feature groups, B·ROW_CTAS). A CTA has 128 features (two heads of 64), ROWS
// rows of a sequence, and splits x, x + CONTEXT_CTAS, … of the context (latent_walk.cuh). Its four
// warpgroups form a pipeline:
// - one copies latents and rotary tables to a ring;
// - two hold the CTA's part of w_k in registers and rebuild the keys of a tile, 64 features each
//   (latent_keys.cuh); one uses the tensor cores while the other rotates;
// - the last computes S = Q·Kᵀ, the weights, and their sums of latents (latent_mix.cuh).
// project_values (values.cu) merges the splits. The sums of a row depend neither on other rows of
// the launch nor on the grid.
//
// A token takes 2·ENTRY bytes from memory, and as many from L2 for each feature group. It takes
// 2·ENTRY·KV_HEADS·WIDTH operations for its keys, and 2·KV_HEADS·GROUP·(WIDTH + ENTRY) per row. For
// GPT-OSS with a latent of 512 these are 1 KB and 0.52 + 0.07 MFLOP: the rebuild is the bottleneck.
#include "device/attend.cuh"
#include "device/config.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attend_latents(const uint32_t* q, const uint4* c_pool, const uint4* w_k, const uint16_t* b_k,
                   const uint4* cos, const uint4* sin, const int* page_table, const int* row_start,
                   const int* row_slot, const int* tree_start, const int* ancestor_bits,
                   const int* selected, const int* page_position, float2* workspace_sums,
                   float* workspace_values) {
  DYNAMIC_SHARED(unsigned char, shared);
  const Memory memory(shared);
  const Inputs in = INPUTS;
  // Before griddepcontrol.wait, guess whether this CTA has a tile, to load its weights early.
  const auto early = [&] {
    const int sequence = blockIdx.z / Config::kRowCtas;
    const int slot =
        load_l2_int(row_slot + min(sequence * Config::kSequenceRows, Config::kLaunchRows - 1));
    return Config::kWindow > 0 || static_cast<int>(blockIdx.x) <= slot / kTile + 1;
  };
  attend_sequence(in, memory, early, [&](LatentRows& rows, int first, int count, int sequence) {
    rows.open(first, count, in.rows, tree_start[sequence]);
    return true;
  });
}
