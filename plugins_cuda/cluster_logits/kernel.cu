// ClusterLogits: fp32 logits of the tokens in the best clusters of each row, and for other tokens v
// UNREAD − UNREAD_STEP·v.
//
//   scores      [rows, CLUSTERS] fp32, in
//   x           [T, WIDTH] bf16, in
//   logit_rows  [rows] int32, in
//   weight      [vocab, WIDTH] bf16, in, constant
//   cluster_of  [vocab] int32, in, constant
//   logits      [rows, vocab] fp32, out
//
// Grid (parts of the tokens, rows). A CTA selects the row's READ clusters itself and writes the
// logits of all of its tokens, so neither a selection nor a fill needs a launch of its own. The
// assistant of Gemma 4 E4B has 128 parts of 2048 tokens, of which 32 tokens are read on average; a
// row reads 2 MB of weights and 1 MB of cluster numbers, and writes 1 MB.
//
// Memory latencies determine the time: of the scores and x, then of the weights.
#include "../_device/normed_rows.cuh"
#include "../_device/ordered_key.cuh"
#include "../_device/ptx_load.cuh"

CONFIG

namespace {

constexpr int kThreads = Config::kThreads, kWarps = kThreads / 32;
constexpr int kOwnTokens = Config::kTokensOfAThread, kPart = kThreads * kOwnTokens;
constexpr int kOwnScores = ceil_div(Config::kClusters, kThreads);
constexpr int kGroupLanes = 4, kGroups = kThreads / kGroupLanes;
static_assert(Config::kRead <= kGroups, "the bound is the READ-th largest of the groups' maxima");
// 16-byte loads of a lane for a row of 8·32 columns each, and rows whose loads are in flight.
constexpr int kPieces = ceil_div(Config::kWidth, kPieceElements);
constexpr int kRowsInFlight = kPieces < 4 ? 4 / kPieces : 1;
constexpr float kUnread = static_cast<float>(Config::kUnread);
constexpr float kUnreadStep = static_cast<float>(Config::kUnreadStep);

// The clusters that a row reads, as bits. The READ-th largest maximum of groups of threads is a
// lower bound of the READ-th largest score, so few scores must be ranked.
struct Selection {
  uint32_t bits[ceil_div(Config::kClusters, 32)];
  uint32_t maxima[kGroups];
  uint64_t shortlist[Config::kClusters];
  uint32_t bound;
  int count;

  __device__ __forceinline__ void clear() {
    for (int i = threadIdx.x; i < ceil_div(Config::kClusters, 32); i += kThreads) bits[i] = 0;
    if (threadIdx.x == 0) count = 0;
  }

  __device__ __forceinline__ bool contains(int cluster) const {
    return bits[cluster / 32] >> cluster % 32 & 1;
  }

  // All threads call it after clear(); a barrier must follow.
  __device__ __forceinline__ void select(const float* scores) {
    uint32_t keys[kOwnScores];
#pragma unroll
    for (int i = 0; i < kOwnScores; ++i) {
      const int cluster = i * kThreads + static_cast<int>(threadIdx.x);
      keys[i] = cluster < Config::kClusters ? ordered_key(load_l2_float(scores + cluster)) : 0;
    }
    uint32_t maximum = 0;
#pragma unroll
    for (int i = 0; i < kOwnScores; ++i) maximum = max(maximum, keys[i]);
#pragma unroll
    for (int distance = kGroupLanes / 2; distance > 0; distance /= 2) {
      maximum = max(maximum, __shfl_xor_sync(kAllLanes, maximum, distance));
    }
    if (threadIdx.x % kGroupLanes == 0) maxima[threadIdx.x / kGroupLanes] = maximum;
    __syncthreads();
    if (threadIdx.x < kGroups) {
      const int group = threadIdx.x;
      const uint32_t own = maxima[group];
      int rank = 0;
#pragma unroll 8
      for (int other = 0; other < kGroups; ++other) {
        rank += maxima[other] > own || (maxima[other] == own && other < group);
      }
      if (rank == Config::kRead - 1) bound = own;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kOwnScores; ++i) {
      const int cluster = i * kThreads + static_cast<int>(threadIdx.x);
      // The order in which threads arrive does not matter: each entry is ranked below.
      if (cluster < Config::kClusters && keys[i] >= bound) {
        shortlist[atomicAdd(&count, 1)] = ranked_key(keys[i], cluster);
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += kThreads) {
      int rank = 0;
#pragma unroll 4
      for (int other = 0; other < count; ++other) rank += shortlist[other] > shortlist[i];
      const uint32_t cluster = ranked_index(shortlist[i]);
      if (rank < Config::kRead) atomicOr(&bits[cluster / 32], 1u << cluster % 32);
    }
  }
};

// The columns of a row that a lane multiplies.
struct Columns {
  uint4 pieces[kPieces];

  static __device__ __forceinline__ int first(int piece) {
    return piece * kPieceElements + static_cast<int>(threadIdx.x) % 32 * 8;
  }

  template <class Load>
  __device__ __forceinline__ void load(const uint16_t* row, const Load& load_16) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      pieces[i] = first(i) < Config::kWidth ? load_16(row + first(i)) : make_uint4(0, 0, 0, 0);
    }
  }

  // Return the product of two rows, to every lane.
  __device__ __forceinline__ float product(const Columns& other) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const uint32_t own[4] = {pieces[i].x, pieces[i].y, pieces[i].z, pieces[i].w};
      const uint32_t others[4] = {other.pieces[i].x, other.pieces[i].y, other.pieces[i].z,
                                  other.pieces[i].w};
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const float2 a = unpack_bf16x2(own[word]), b = unpack_bf16x2(others[word]);
        sum = fmaf(a.x, b.x, sum);
        sum = fmaf(a.y, b.y, sum);
      }
    }
    return warp_sum(sum);
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    cluster_logits(const float* scores, const uint16_t* x, const int* logit_rows,
                   const uint16_t* weight, const int* cluster_of, float* logits, int vocab) {
  __shared__ Selection selection;
  __shared__ uint16_t read[kPart];  // tokens of the part
  __shared__ int num_read;
  pdl_launch_dependents();
  const int row = blockIdx.y, part = blockIdx.x * kPart, thread = threadIdx.x;
  int clusters[kOwnTokens];
#pragma unroll
  for (int i = 0; i < kOwnTokens; ++i) {
    const int token = part + i * kThreads + thread;
    clusters[i] = token < vocab ? static_cast<int>(load_early4(cluster_of + token)) : 0;
  }
  selection.clear();
  if (thread == 0) num_read = 0;
  pdl_wait();

  Columns own;
  own.load(x + static_cast<int64_t>(load_l2_int(logit_rows + row)) * Config::kWidth,
           [](const uint16_t* place) { return load_l2_16(place); });
  selection.select(scores + static_cast<int64_t>(row) * Config::kClusters);
  __syncthreads();
  float* part_logits = logits + static_cast<int64_t>(row) * vocab + part;
#pragma unroll
  for (int i = 0; i < kOwnTokens; ++i) {
    const int place = i * kThreads + thread;
    if (part + place >= vocab) break;
    if (selection.contains(clusters[i])) {
      // Each logit is computed alone, so the order of the list does not matter.
      read[atomicAdd(&num_read, 1)] = static_cast<uint16_t>(place);
    } else {
      part_logits[place] = kUnread - kUnreadStep * static_cast<float>(part + place);
    }
  }
  __syncthreads();

  const int warp = thread / 32, lane = thread % 32;
  const uint16_t* part_weight = weight + static_cast<int64_t>(part) * Config::kWidth;
#pragma unroll 1
  for (int start = warp * kRowsInFlight; start < num_read; start += kWarps * kRowsInFlight) {
    Columns rows[kRowsInFlight];
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      // Past the end, the last token is computed again.
      const int place = read[min(start + i, num_read - 1)];
      rows[i].load(part_weight + static_cast<int64_t>(place) * Config::kWidth,
                   [](const uint16_t* address) { return load_constant16(address); });
    }
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      const float logit = own.product(rows[i]);
      if (lane == 0 && start + i < num_read) part_logits[read[start + i]] = logit;
    }
  }
}
