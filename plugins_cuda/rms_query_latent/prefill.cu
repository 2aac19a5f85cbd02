// RmsQueryLatent in prefill: norm, query and latent projections, RoPE, and cache write.
//
//   x                 bf16 [rows, K], in
//   norm              bf16 [K], in, HAS_NORM
//   weight            bf16 [N/16, K/32, 512], in, packed (packing.py)
//   bias              bf16 [N], in, HAS_BIAS; in packed order
//   cos, sin          fp32 [positions, D/2], in
//   positions         int32 [rows], in
//   write_slot        int32 [rows], in
//   c_pool            bf16 [pages, 1, PAGE_SIZE, LATENT], in and out
//   q                 bf16 [rows, Q_HEADS, D], out
//   workspace_panels  K rounded up to 64 · rows rounded up to COLUMNS, bf16: panels of rms(x)
//
// Two launches, as in RmsQkvRope: rms(x) as panels, then the GEMM. The packed rows are Q_HEADS
// heads of D, whose tile j holds rows 8j … 8j+7 and D/2+8j … D/2+8j+7, then LATENT rows in order.
#include "../_device/prefill_heads.cuh"
#include "../_device/prefill_rows.cuh"
#include "device/config.cuh"

extern "C" __global__ void __launch_bounds__(kRowsThreads)
    rms_query_latent_rows(const uint16_t* x, const uint16_t* norm, unsigned char* workspace_panels,
                          int rows, int panel_rows) {
  write_panel_rows<Config::kKBlocks, Config::kHasNorm ? Norm::kGptOss : Norm::kNone>(
      x, norm, static_cast<float>(Config::kEps), workspace_panels, rows, panel_rows);
}

struct QueryLatentGemm : HeadsGemm<Config> {
  uint16_t* c_pool;

  template <int columns>
  __device__ __forceinline__ void store(const GemmTile& tile, LaneBias ahead,
                                        const float (&sums)[columns / 2], uint16_t* staging) const {
    stage_rows<columns>(sums, ahead.widened(), staging);
    const int first_tile = tile.row_tile + 4 * warpgroup();
    for_each_fetched_piece<4>(
        tile.live,
        [&](int token, int piece) { return place_of(tile.first + token, first_tile + piece); },
        [&](int token, int piece, const Place& at) {
          const int packed = first_tile + piece, head = packed / kHeadTiles;
          if (packed >= Config::kRowTiles) return;
          const uint4* const staged =
              reinterpret_cast<const uint4*>(staging + token * kRowsStride + 16 * piece);
          uint4 first = staged[0], second = staged[1];
          if (head >= Config::kQHeads) {
            uint16_t* const out = c_pool + static_cast<size_t>(at.slot) * Config::kLatent +
                                  16 * (packed - Config::kQHeads * kHeadTiles);
            *reinterpret_cast<uint4*>(out) = first;
            *reinterpret_cast<uint4*>(out + 8) = second;
            return;
          }
          at.rotate(first, second);
          const size_t row = tile.first + token;
          uint16_t* const out =
              q + (row * Config::kQHeads + head) * Config::kHeadDim + 8 * (packed % kHeadTiles);
          *reinterpret_cast<uint4*>(out) = first;
          *reinterpret_cast<uint4*>(out + Config::kHeadDim / 2) = second;
        });
  }
};

extern "C" __global__ void __launch_bounds__(kGemmThreads, 1)
    rms_query_latent_gemm(const DenseWeights<Config>::Units::Stored* weight, const uint16_t* bias,
                          const float* cos, const float* sin, const int* positions,
                          const int* write_slot, uint16_t* c_pool, uint16_t* q,
                          const unsigned char* workspace_panels, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ TileRing<Config> ring;
  QueryLatentGemm gemm;
  gemm.weight = weight;
  gemm.panel_start = workspace_panels;
  gemm.rows = rows;
  gemm.bias = bias;
  gemm.cos = cos;
  gemm.sin = sin;
  gemm.positions = positions;
  gemm.write_slot = write_slot;
  gemm.c_pool = c_pool;
  gemm.q = q;
  prefill_gemm(gemm, ring, shared);
}
