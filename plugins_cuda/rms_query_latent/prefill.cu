// RmsQueryLatent over a prompt chunk: norm, query and latent projections, rotation, cache writing.
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
//   workspace_panels  K rounded up to 64 · rows rounded up to COLUMNS, bf16: panels of the normed x
//
// Two launches, as RmsQkvRope's: normed x as panels, then the GEMM. The packed rows are Q_HEADS
// heads of D, of which tile j holds rows 8j … 8j+7 and D/2+8j … D/2+8j+7, and LATENT rows in order.
#include "../_device/prefill_dense.cuh"
#include "../_device/prefill_rows.cuh"
#include "../_device/prefill_store.cuh"

extern "C" __global__ void __launch_bounds__(kRowsThreads)
    rms_query_latent_rows(const uint16_t* x, const uint16_t* norm, unsigned char* workspace_panels,
                          int rows, int panel_rows) {
  write_panel_rows<HAS_NORM ? Norm::kGptOss : Norm::kNone>(x, norm, static_cast<float>(EPS),
                                                           workspace_panels, rows, panel_rows);
}

struct QueryLatentGemm : DenseGemm {
  static constexpr int kStagingValues = kRowsStride;
  static constexpr int kHeadTiles = HEAD_DIM / 16;
  const uint16_t* bias;
  const float* cos;
  const float* sin;
  const int* positions;
  const int* write_slot;
  uint16_t* c_pool;
  uint16_t* q;

  __device__ __forceinline__ LaneBias ahead_of(const GemmTile& tile) const {
#if HAS_BIAS
    return lane_bias(bias, tile);
#else
    return {0, 0};
#endif
  }

  // Angles of eight pairs at a token's position, and where its latent goes.
  struct Place {
    float2 cos[4], sin[4];
    int slot;
  };

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
          if (packed >= ROW_TILES) return;
          const uint4* const staged =
              reinterpret_cast<const uint4*>(staging + token * kRowsStride + 16 * piece);
          uint4 first = staged[0], second = staged[1];
          if (head >= Q_HEADS) {
            uint16_t* const out = c_pool + static_cast<size_t>(at.slot) * LATENT +
                                  16 * (packed - Q_HEADS * kHeadTiles);
            *reinterpret_cast<uint4*>(out) = first;
            *reinterpret_cast<uint4*>(out + 8) = second;
            return;
          }
          rotate(first, second, at);
          const size_t row = tile.first + token;
          uint16_t* const out = q + (row * Q_HEADS + head) * HEAD_DIM + 8 * (packed % kHeadTiles);
          *reinterpret_cast<uint4*>(out) = first;
          *reinterpret_cast<uint4*>(out + HEAD_DIM / 2) = second;
        });
  }

  // Of packed rows 16·packed … + 15: of a head those of pairs i = 8·part … + 7.
  __device__ __forceinline__ Place place_of(int row, int packed) const {
    Place at;
    const bool rotated = packed < Q_HEADS * kHeadTiles;
    at.slot = rotated ? 0 : write_slot[row];
    const size_t angles =
        static_cast<size_t>(positions[row]) * (HEAD_DIM / 2) + 8 * (packed % kHeadTiles);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      at.cos[i] = *reinterpret_cast<const float2*>(cos + angles + 2 * i);
      at.sin[i] = *reinterpret_cast<const float2*>(sin + angles + 2 * i);
    }
    return at;
  }

  // Eight pairs (i, i + D/2).
  static __device__ __forceinline__ void rotate(uint4& first, uint4& second, const Place& at) {
    uint32_t* const a = &first.x;
    uint32_t* const b = &second.x;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 c = at.cos[i], s = at.sin[i];
      const float2 u = unpack_bf16x2(a[i]), v = unpack_bf16x2(b[i]);
      a[i] = pack_bf16x2(u.x * c.x - v.x * s.x, u.y * c.y - v.y * s.y);
      b[i] = pack_bf16x2(v.x * c.x + u.x * s.x, v.y * c.y + u.y * s.y);
    }
  }
};

extern "C" __global__ void __launch_bounds__(kGemmThreads, 1)
    rms_query_latent_gemm(const DenseWeights::Units::Stored* weight, const uint16_t* bias,
                          const float* cos, const float* sin, const int* positions,
                          const int* write_slot, uint16_t* c_pool, uint16_t* q,
                          const unsigned char* workspace_panels, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ Ring ring;
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
