// RmsIndexer in prefill: norm, an indexer's projections, and its key in its cache slot.
//
//   x                 bf16 [rows, K], in
//   norm              bf16 [K], in, HAS_NORM
//   weight            bf16 [N/16, K/32, 512], in, packed (packing.py)
//   write_slot        int32 [rows], in
//   key_pool          bf16 or, KEY_BYTES 1, e4m3 [pages, 1, PAGE_SIZE, WIDTH], in and out
//   q                 bf16 [rows, HEADS, WIDTH], out
//   head_weights      bf16 [rows, HEADS], out; ones if the weight has no rows for them
//   workspace_panels  K rounded up to 64 · rows rounded up to COLUMNS, bf16: panels of rms(x)
//
// Two launches, as in RmsQkvRope: rms(x) as panels, then the GEMM.
#include "../_device/prefill_dense.cuh"
#include "../_device/prefill_rows.cuh"
#include "../_device/prefill_store.cuh"
#include "device/config.cuh"
#include "device/keys.cuh"

extern "C" __global__ void __launch_bounds__(kRowsThreads)
    rms_indexer_rows(const uint16_t* x, const uint16_t* norm, unsigned char* workspace_panels,
                     int rows, int panel_rows) {
  write_panel_rows<Config::kKBlocks, Config::kHasNorm ? Norm::kGptOss : Norm::kNone>(
      x, norm, static_cast<float>(Config::kEps), workspace_panels, rows, panel_rows);
}

constexpr int kQueryTiles = Config::kHeads * Config::kWidth / 16, kKeyTiles = Config::kWidth / 16;
constexpr bool kWeighted = Config::kRowTiles > kQueryTiles + kKeyTiles;

struct IndexerGemm : DenseGemm<Config> {
  static constexpr int kStagingValues = kRowsStride;
  const int* write_slot;
  KeyElement* key_pool;
  uint16_t* q;
  uint16_t* head_weights;

  __device__ __forceinline__ LaneBias ahead_of(const GemmTile&) const {
    return {0, 0};
  }

  template <int columns>
  __device__ __forceinline__ void store(const GemmTile& tile, LaneBias ahead,
                                        const float (&sums)[columns / 2], uint16_t* staging) const {
    stage_rows<columns>(sums, ahead.widened(), staging);
    const int first_tile = tile.row_tile + 4 * warpgroup();
    for_each_fetched_piece<4>(
        tile.live,
        [&](int token, int piece) {
          const int key = first_tile + piece - kQueryTiles;
          return key >= 0 && key < kKeyTiles ? write_slot[tile.first + token] : 0;
        },
        [&](int token, int piece, int slot) {
          const int packed = first_tile + piece, row = tile.first + token;
          if (packed >= Config::kRowTiles) return;
          const uint16_t* const staged = staging + token * kRowsStride + 16 * piece;
          uint16_t* out =
              q + static_cast<size_t>(row) * (Config::kHeads * Config::kWidth) + 16 * packed;
          if (packed >= kQueryTiles + kKeyTiles) {
            store_weights(staged, row, 16 * (packed - kQueryTiles - kKeyTiles));
            return;
          }
          const uint4* const from = reinterpret_cast<const uint4*>(staged);
          if (packed >= kQueryTiles) {
            const int64_t first =
                static_cast<int64_t>(slot) * Config::kWidth + 16 * (packed - kQueryTiles);
            store_key(from[0], from[1], key_pool + first);
            return;
          }
          *reinterpret_cast<uint4*>(out) = from[0];
          *reinterpret_cast<uint4*>(out + 8) = from[1];
        });
  }

  // Store 16 values of a key.
  __device__ __forceinline__ static void store_key(uint4 front, uint4 back, KeyElement* out) {
    uint4* const to = reinterpret_cast<uint4*>(out);
    if (Config::kKeyBytes == 2) {
      to[0] = front;
      to[1] = back;
      return;
    }
    to[0] = make_uint4(
        as_keys(front.y) << 16 | as_keys(front.x), as_keys(front.w) << 16 | as_keys(front.z),
        as_keys(back.y) << 16 | as_keys(back.x), as_keys(back.w) << 16 | as_keys(back.z));
  }

  __device__ __forceinline__ void store_weights(const uint16_t* staged, int row, int first) const {
    for (int i = 0; i < 16 && first + i < Config::kHeads; ++i) {
      head_weights[static_cast<size_t>(row) * Config::kHeads + first + i] = staged[i];
    }
  }
};

extern "C" __global__ void __launch_bounds__(kGemmThreads, 1)
    rms_indexer_gemm(const DenseWeights<Config>::Units::Stored* weight, const int* write_slot,
                     KeyElement* key_pool, uint16_t* q, uint16_t* head_weights,
                     const unsigned char* workspace_panels, int rows) {
  DYNAMIC_SHARED(unsigned char, shared);
  __shared__ TileRing<Config> ring;
  IndexerGemm gemm;
  gemm.weight = weight;
  gemm.panel_start = workspace_panels;
  gemm.rows = rows;
  gemm.write_slot = write_slot;
  gemm.key_pool = key_pool;
  gemm.q = q;
  gemm.head_weights = head_weights;
  if (!kWeighted) {
    pdl_wait();  // a previous launch may still use these bytes
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < rows * Config::kHeads;
         i += gridDim.x * blockDim.x) {
      head_weights[i] = float_to_bf16(1.0f);
    }
  }
  prefill_gemm(gemm, ring, shared);
}
