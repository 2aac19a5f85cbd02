// DsaCheck: validates lists of slots, and replaces broken ones by full attention.
//
//   selected       i32 [T, views, held]
//   row_start      i32 [B + 1]
//   row_slot, positions  i32 [T]
//   tree_start, budget   i32 [B]
//   ancestor_bits  i32  [T, WORDS]
//   checked        i32 [T, views, held], out; rows of no sequence are not written
//   violations     i32 [B], out
//
// One CTA per sequence, one warp per piece of a list. The visible and the mandatory slots of a row
// follow from its position; each entry is compared with the previous one. Four lists of 2150 slots
// are 34 kB to read and 34 kB to write. Lists are written as read, and again if one is broken.
//
// Memory latencies determine the time. A warp loads its first piece together with row_start, as if
// all sequences had equally many rows. Otherwise it loads the piece again.
#include "../_device/list_range.cuh"
#include "../_device/ptx.cuh"

CONFIG

constexpr int kOfALane = Config::kOfALane, kPiece = 32 * kOfALane, kWarps = Config::kThreads / 32;

// The valid lists of a row: `num_listed` slots, `kept` of them below `first` or from `late` on.
// `num_listed` is −1 if the list has only the mark of a whole row.
struct Promise {
  int start, chain, first, late, kept, num_listed;
  uint32_t ancestors[Config::kWords];

  __device__ __forceinline__ bool sees(int slot) const {
    if (slot < chain) return slot >= 0;
    const int node = slot - start;
    if (slot < start || node >= 32 * Config::kWords) return false;
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < Config::kWords; ++i) bits = node / 32 == i ? ancestors[i] : bits;
    return bits >> (node % 32) & 1u;
  }

  // Whether entry `at` may be `slot`, after `before`.
  __device__ __forceinline__ bool allows(int at, int slot, int before) const {
    if (at < num_listed) return slot > before && sees(slot);
    return slot == (num_listed < 0 && at == 0 ? -2 : -1);
  }

  __device__ __forceinline__ bool keeps(int at, int slot) const {
    return at < num_listed && (slot < first || slot >= late);
  }
};

// The data of a row that its list depends on.
struct Place {
  int slot, position, ancestors[Config::kWords];

  __device__ __forceinline__ Promise promise(int start, int allowed, int threshold,
                                             int first_tokens, int recent_tokens) const {
    Promise promised{};
    promised.num_listed = -1;
    if (allowed < 0 || position < threshold) return promised;
    const ListRange range =
        list_range<Config::kWords>(slot, start, ancestors, first_tokens, recent_tokens);
    const int seen = range.chain + range.nodes;
    promised.start = start, promised.chain = range.chain;
    promised.first = first_tokens, promised.late = range.late;
    promised.kept = seen - range.others();
    promised.num_listed = min(seen, promised.kept + allowed);
#pragma unroll
    for (int i = 0; i < Config::kWords; ++i)
      promised.ancestors[i] = static_cast<uint32_t>(ancestors[i]);
    return promised;
  }
};

// A piece of a list; lane i has entries i, i + 32, …
struct Piece {
  int slots[kOfALane];
  int before;  // the entry before the piece, −1 at the start of the list
  Place place;

  __device__ __forceinline__ void load(const int* list, int begin, int held, int row,
                                       const int* row_slot, const int* positions,
                                       const int* ancestor_bits) {
#pragma unroll
    for (int j = 0; j < kOfALane; ++j) {
      const int at = begin + 32 * j + static_cast<int>(threadIdx.x) % 32;
      slots[j] = at < held ? list[at] : -1;
    }
    before = begin > 0 ? list[begin - 1] : -1;
    place.slot = row_slot[row];
    place.position = positions[row];
#pragma unroll
    for (int i = 0; i < Config::kWords; ++i) {
      place.ancestors[i] = ancestor_bits[static_cast<int64_t>(row) * Config::kWords + i];
    }
  }
};

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    check_lists(const int* selected, const int* row_start, const int* row_slot,
                const int* tree_start, const int* ancestor_bits, const int* positions,
                const int* budget, int* checked, int* violations, int rows_in_all,
                int rows_of_a_sequence, int views, int held, int threshold, int first_tokens,
                int recent_tokens) {
  // Per list: mandatory entries minus required ones; negative if the list is broken.
  DYNAMIC_SHARED(int, missing);
  __shared__ int broken;
  pdl_launch_dependents();
  for (int i = threadIdx.x; i < rows_in_all * views; i += Config::kThreads) missing[i] = 0;
  if (threadIdx.x == 0) broken = 0;
  __syncthreads();
  pdl_wait();
  const int b = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int pieces = ceil_div(held, kPiece);
  const int first = load_l2_int(row_start + b), stop = load_l2_int(row_start + b + 1);
  const int start = load_l2_int(tree_start + b), allowed = load_l2_int(budget + b);
  Piece piece;
  // Load piece `i` of the sequence whose rows start with `first`.
  const auto load = [&](int first, int i) {
    const int index = i / pieces, row = first + index / views;
    const int* list = selected + (static_cast<int64_t>(first) * views + index) * held;
    piece.load(list, i % pieces * kPiece, held, row, row_slot, positions, ancestor_bits);
  };
  const int guess = b * rows_of_a_sequence;
  const bool guessed =
      warp < rows_of_a_sequence * views * pieces && guess + rows_of_a_sequence <= rows_in_all;
  if (guessed) load(guess, warp);
  const int lists = (stop - first) * views;
  const int64_t begin = static_cast<int64_t>(first) * views * held;
  for (int i = warp; i < lists * pieces; i += kWarps) {
    if (i != warp || !guessed || first != guess) load(first, i);
    const int index = i / pieces, from = i % pieces * kPiece;
    const Promise promise =
        piece.place.promise(start, allowed, threshold, first_tokens, recent_tokens);
    bool right = promise.num_listed <= held;
    int keeps = 0, before = piece.before;
#pragma unroll
    for (int j = 0; j < kOfALane; ++j) {
      const int at = from + 32 * j + lane, slot = piece.slots[j];
      const int front = __shfl_up_sync(kAllLanes, slot, 1);
      const int last = __shfl_sync(kAllLanes, slot, 31);
      if (at < held) {
        checked[begin + static_cast<int64_t>(index) * held + at] = slot;
        right = right && promise.allows(at, slot, lane == 0 ? before : front);
        keeps += promise.keeps(at, slot);
      }
      before = last;
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      keeps += __shfl_xor_sync(kAllLanes, keeps, distance);
    }
    right = __all_sync(kAllLanes, right);
    if (from == 0) keeps -= promise.kept;
    if (lane == 0) atomicAdd(&missing[index], right ? keeps : -2 * held - 1);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < lists; i += Config::kThreads) {
    if (missing[i] != 0) atomicAdd(&broken, 1);
  }
  __syncthreads();
  if (threadIdx.x == 0) violations[b] = broken;
  if (broken == 0) return;
  for (int i = threadIdx.x; i < lists * held; i += Config::kThreads) {
    checked[begin + i] = i % held == 0 ? -2 : -1;
  }
}
