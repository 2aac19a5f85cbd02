// Advance: the captured rows of the accepted paths are gathered by one CTA each; the last CTA to
// arrive, after which nobody reads the state any more, moves the state and writes the ring.
//
// Moves 2·C bytes per emitted token (17 KB at GPT-OSS's three taps) and a few bytes to the host.
#include "../_device/ptx_system.cuh"
#include "../_device/step_rows.cuh"

constexpr int kEosIds = 8;

// What a step says of the sequences, as a CTA needs it to know how many tokens each emits.
struct Emission {
  const int* choice;
  const int* path;      // null: the root alone
  const int* accepted;  // null with it
  const int* length;
  const int* done;
  const int* limit;
  const int* ignore_eos;
  const int* eos_ids;
  int nodes, path_width;

  __device__ int row(int b, int i) const {
    return b * nodes + (path == nullptr ? 0 : path[b * path_width + i]);
  }

  __device__ bool ends_with(int b, int token) const {
    if (ignore_eos[b]) return false;
    bool found = false;
    for (int i = 0; i < kEosIds; ++i) found |= token >= 0 && eos_ids[i] == token;
    return found;
  }

  // How many tokens sequence b emits, and whether it is done then. All lanes of a warp call it.
  __device__ int count(int b, bool& ends) const {
    const int lane = threadIdx.x % 32;
    const int room = done[b] ? 0 : limit[b] - length[b] - 1;
    const int offered = min(accepted == nullptr ? 1 : accepted[b] + 1, max(room, 0));
    for (int first = 0; first < offered; first += 32) {
      const int i = first + lane;
      const bool end = i < offered && ends_with(b, choice[row(b, i)]);
      const unsigned found = __ballot_sync(0xFFFFFFFFu, end);
      if (found) {
        ends = true;
        return first + __ffs(static_cast<int>(found));
      }
    }
    ends = offered >= room;
    return offered;
  }
};

// The rows that wait for the draft after this step: what is kept of the old ones, then the new.
struct Pending {
  int kept, dropped, count;  // the oldest ``dropped`` of kept + new rows go

  __device__ Pending(int old_rows, int new_rows, int room)
      : kept(old_rows),
        dropped(max(old_rows + new_rows - room, 0)),
        count(old_rows + new_rows - dropped) {}
};

extern "C" __global__ void __launch_bounds__(512, 1)
    advance_batch(const int* choice,      // [T], T = B·N1
                  const float* logprob,   // [T]
                  const int* path,        // [B, D1] or null
                  const int* accepted,    // [B] or null
                  const uint4* captured,  // [T, C] bf16, C = 8 · vectors, or null
                  int* length,            // in and out [B]
                  int* root,              // in and out [B]
                  int* pending_count,     // in and out [B], null without captured, as the next two
                  int* pending_tokens,    // in and out [B, DM1]
                  uint4* pending_captured,      // in and out [B, DM1, C] bf16
                  int* done,                    // in and out [B]
                  const int* limit,             // [B]
                  const int* ignore_eos,        // [B]
                  const int* eos_ids,           // [8]
                  int* step,                    // in and out [1]
                  int* ring_tokens,             // out [S, BM, R1], host memory, as all that follow
                  float* ring_logprobs,         // out [S, BM, R1]
                  int* ring_accepted,           // out [S, BM]
                  int* ring_count,              // out [S, BM]
                  int* ring_step,               // out [S]
                  unsigned* workspace_arrived,  // [1], zero before and after
                  int batch, int nodes, int path_width, int vectors, int room, int ring_slots,
                  int ring_batch, int ring_width, int extended) {
  __shared__ int shared_count;
  __shared__ bool is_last;
  pdl_launch_dependents();
  pdl_wait();
  const Emission emission{choice, path,       accepted, length, done,
                          limit,  ignore_eos, eos_ids,  nodes,  path_width};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool drafts = captured != nullptr && pending_captured != nullptr;

  if (drafts) {
    const int b = blockIdx.x;
    if (warp == 0) {
      bool ends;
      const int count = emission.count(b, ends);
      if (lane == 0) shared_count = count;
    }
    __syncthreads();
    const int count = shared_count;
    const Pending pending(extended ? 0 : pending_count[b], count, room);
    uint4* rows = pending_captured + static_cast<int64_t>(b) * room * vectors;
    // Where rows move within the buffer, one CTA has them all and goes from the oldest on; every
    // thread then reads and writes columns of its own.
    for (int i = count > 0 ? blockIdx.y : pending.count; i < pending.count; i += gridDim.y) {
      const int from = i + pending.dropped;
      const uint4* source = rows + static_cast<int64_t>(from) * vectors;
      if (from >= pending.kept) {
        const int64_t row = emission.row(b, from - pending.kept);
        source = captured + row * vectors;
      }
      if (source != rows + static_cast<int64_t>(i) * vectors) {
        copy_row(rows + static_cast<int64_t>(i) * vectors, source, vectors);
      }
    }
  }

  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(workspace_arrived, 1u) == gridDim.x * gridDim.y - 1;
  }
  __syncthreads();
  if (!is_last) return;

  const int now = step[0], slot = now % ring_slots;
  for (int b = warp; b < batch; b += blockDim.x / 32) {
    bool ends = false;
    const int count = emission.count(b, ends);
    const int entry = slot * ring_batch + b;
    for (int i = lane; i < count; i += 32) {
      const int row = emission.row(b, i);
      ring_tokens[entry * ring_width + i] = choice[row];
      ring_logprobs[entry * ring_width + i] = logprob[row];
    }
    if (lane == 0) {
      ring_count[entry] = count;
      ring_accepted[entry] = min(accepted == nullptr ? 0 : accepted[b], count);
    }
    if (count == 0) continue;
    if (drafts) {
      const Pending pending(extended ? 0 : pending_count[b], count, room);
      int* tokens = pending_tokens + b * room;
      for (int first = 0; first < pending.count; first += 32) {
        const int i = first + lane, from = i + pending.dropped;
        int token = 0;
        if (i < pending.count) {
          token = from < pending.kept ? tokens[from] : choice[emission.row(b, from - pending.kept)];
        }
        __syncwarp();
        if (i < pending.count) tokens[i] = token;
      }
      __syncwarp();
      if (lane == 0) pending_count[b] = pending.count;
    }
    __syncwarp();
    if (lane == 0) {
      root[b] = choice[emission.row(b, count - 1)];
      length[b] += count;
      done[b] = ends ? 1 : 0;
    }
  }
  fence_system();
  __syncthreads();
  if (threadIdx.x == 0) {
    store_system(ring_step + slot, now + 1);
    step[0] = now + 1;
    *workspace_arrived = 0;
  }
}
