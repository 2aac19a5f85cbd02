// RmsQkvRope of a prompt chunk: norm, Q, K and V projections, rotation, writes of K and V.
//
//   x              bf16 [rows, K], in
//   norm           bf16 [K], in, HAS_NORM
//   weight         bf16 [N/16, K/32, 512], in, packed (packing.py), or in the format WEIGHTS
//   bias           bf16 [N], in, HAS_BIAS; in packed order
//   q_norm, k_norm bf16 [D], in, HEAD_NORMS
//   cos, sin       fp32 [positions, D/2], in
//   positions      int32 [rows], in
//   write_slot     int32 [rows], in
//   k_pool, v_pool bf16 [pages, KV_HEADS, PAGE_SIZE, D], in and out, with CODES e4m3; with
//                  HEAD_NORMS too, k_pool is a workspace bf16 [rows, KV_HEADS, D]
//   q              bf16 [rows, Q_HEADS, D], out
//   workspace      bf16, K rounded up to 64 · rows rounded up to COLUMNS: panels of normalized x
//
// Two launches: the norm writes panels, then the GEMM follows. With HEAD_NORMS, a third launch
// (device/normed_heads.cuh) processes the projected queries and keys. The packed rows are (Q_HEADS
// + 2·KV_HEADS) heads of D (prefill_heads.cuh). For 2048 rows, 2880 → 5120: 60.4 GFLOP; 29 MB of
// weights, 12 MB of x twice, 21 MB out. With 256 tokens per tile, 320 tiles are 2.4 waves of 132
// CTAs: about 115 µs at 525 TFLOP/s, and 5 µs for the panels.
#include "device/cache_codes.cuh"
#include "../_device/prefill_heads.cuh"
#include "../_device/prefill_rows.cuh"
#include "device/config.cuh"
#include "device/normed_heads.cuh"
#include "device/query_growth.cuh"

constexpr Norm kNorm = Config::kHasNorm ? static_cast<Norm>(Config::kNormRounding) : Norm::kNone;

extern "C" __global__ void __launch_bounds__(kRowsThreads)
    rms_qkv_rope_rows(const uint16_t* x, const uint16_t* norm, unsigned char* workspace_panels,
                      int rows, int panel_rows) {
  write_panel_rows<Config::kKBlocks, kNorm>(x, norm, static_cast<float>(Config::kEps),
                                            workspace_panels, rows, panel_rows);
}

struct QkvGemm : HeadsGemm<Config> {
  uint16_t* k_pool;
  uint16_t* v_pool;

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
          if (!Config::kHeadNorms && head < Config::kQHeads + Config::kKvHeads)
            at.rotate(first, second);
          if (Config::kGrowth != 0 && !Config::kHeadNorms && head < Config::kQHeads) {
            const float factor = growth_at(cos, positions[tile.first + token]);
            first = grown(first, factor);
            second = grown(second, factor);
          }
          if (is_coded(head)) {
            uint8_t* const out = reinterpret_cast<uint8_t*>(pool_of(head)) +
                                 entry_of(head, at.slot) + 8 * (packed % kHeadTiles);
            *reinterpret_cast<uint2*>(out) = cache_codes(first);
            *reinterpret_cast<uint2*>(out + Config::kHeadDim / 2) = cache_codes(second);
            return;
          }
          uint16_t* const out = head_of(tile.first + token, head, at.slot);
          *reinterpret_cast<uint4*>(out + 8 * (packed % kHeadTiles)) = first;
          *reinterpret_cast<uint4*>(out + 8 * (packed % kHeadTiles) + Config::kHeadDim / 2) =
              second;
        });
  }

  // Return where a head of a row is stored.
  __device__ __forceinline__ uint16_t* head_of(int row, int head, int slot) const {
    if (Config::kKvHeads == 0 || head < Config::kQHeads)
      return q + (static_cast<size_t>(row) * Config::kQHeads + head) * Config::kHeadDim;
    if (Config::kCodes) {  // keys that still need their norm
      const size_t key = static_cast<size_t>(row) * Config::kKvHeads + head - Config::kQHeads;
      return k_pool + key * Config::kHeadDim;
    }
    return pool_of(head) + entry_of(head, slot);
  }

  // Whether a head is quantized here.
  __device__ __forceinline__ static bool is_coded(int head) {
    const int values = Config::kQHeads + Config::kKvHeads;
    return Config::kCodes && head >= (Config::kHeadNorms ? values : Config::kQHeads);
  }

  __device__ __forceinline__ uint16_t* pool_of(int head) const {
    return head < Config::kQHeads + Config::kKvHeads ? k_pool : v_pool;
  }

  // The first value of a head in its pool.
  __device__ __forceinline__ static size_t entry_of(int head, int slot) {
    constexpr int kPoolHeads = Config::kKvHeads > 0 ? Config::kKvHeads : 1;
    const int h = (head - Config::kQHeads) % kPoolHeads;
    const size_t page = static_cast<size_t>(slot / Config::kPageSize) * Config::kKvHeads + h;
    return (page * Config::kPageSize + slot % Config::kPageSize) * Config::kHeadDim;
  }
};

extern "C" __global__ void __launch_bounds__(kGemmThreads, 1)
    rms_qkv_rope_gemm(const DenseWeights<Config>::Units::Stored* weight, const uint16_t* bias,
                      const float* cos, const float* sin, const int* positions,
                      const int* write_slot, uint16_t* k_pool, uint16_t* v_pool, uint16_t* q,
                      const unsigned char* workspace_panels, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ TileRing<Config> ring;
  QkvGemm gemm;
  gemm.weight = weight;
  gemm.panel_start = workspace_panels;
  gemm.rows = rows;
  gemm.bias = bias;
  gemm.cos = cos;
  gemm.sin = sin;
  gemm.positions = positions;
  gemm.write_slot = write_slot;
  gemm.k_pool = k_pool;
  gemm.v_pool = v_pool;
  gemm.q = q;
  prefill_gemm(gemm, ring, shared);
}

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    rms_qkv_rope_heads(const uint16_t* q_norm, const uint16_t* k_norm, const float* cos,
                       const float* sin, const int* positions, const int* write_slot,
                       uint16_t* k_pool, uint16_t* v_pool, uint16_t* q, int rows) {
  const NormedHeads<Config::kQHeads, Config::kKvHeads, Config::kHeadDim, Config::kPageSize,
                    static_cast<NormRounding>(Config::kHeadRounding), false,
                    Config::kWholeNorms != 0, Config::kValueNorm != 0>
      heads{cos, sin, positions, write_slot, k_pool, v_pool, q};
  heads.turn(q_norm, k_norm, static_cast<float>(Config::kEps), rows);
}
