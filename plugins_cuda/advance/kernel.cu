// Advance: a warp finds out what a sequence emits and writes the ring; another one moves the state,
// once all CTAs that copy rows of the sequence have read it; the others copy. The last sequence of
// all tells the host.
//
// Moves 2·C bytes per emitted token (17 KB at GPT-OSS's three taps) and a few bytes to the host.
// Memory is waited for once, then for counts of CTAs, the host's memory and the rows, all three at
// the same time.
#include "../_device/arrival.cuh"
#include "../_device/ptx_system.cuh"
#include "../_device/staged_words.cuh"
#include "../_device/step_rows.cuh"

constexpr int kEosIds = 8;
constexpr int kAdjusts = 1;     // as runtime/engine_dir/plan.py has it
constexpr int kStateWarps = 2;  // where a CTA has one sequence: for the ring, and for its state

// What a step says of a sequence, in shared memory.
struct Verified {
  int* choices;     // [N1]
  float* logprobs;  // [N1]
  int* path;        // [D1]

  __device__ Verified(int* shared, int nodes)
      : choices(shared),
        logprobs(reinterpret_cast<float*>(shared + nodes)),
        path(shared + 2 * nodes) {}
};

// How a sequence stood before, and how many tokens it emits; whether it is done then.
struct Emission {
  int length, pending, accepted, count, ends;
};

struct Inputs {
  const int* choice;
  const float* logprob;
  const int* path;           // null: the root alone
  const int* accepted;       // null with it
  const int* pending_count;  // null without captured features
  const int* length;
  const int* done;
  const int* limit;
  const int* ignore_eos;
  const int* eos_ids;
  const int* row_start;  // null: ``nodes`` rows of each sequence
  int nodes, path_width;

  // The row of a sequence's slot 0.
  __device__ int first_row(int b) const {
    return row_start == nullptr ? b * nodes : load_l2_int(row_start + b);
  }

  __device__ int rows(int b) const {
    return row_start == nullptr ? nodes : load_l2_int(row_start + b + 1) - first_row(b);
  }

  // By one warp.
  __device__ Emission emission(int b, const Verified& verified) const {
    const int lane = threadIdx.x % 32;
    Emission e;
    e.length = load_l2_int(length + b);
    const int most = load_l2_int(limit + b), is_done = load_l2_int(done + b);
    const int ignores = load_l2_int(ignore_eos + b);
    int ids[kEosIds];
#pragma unroll
    for (int i = 0; i < kEosIds; ++i) ids[i] = load_l2_int(eos_ids + i);
    e.pending = pending_count == nullptr ? 0 : load_l2_int(pending_count + b);
    e.accepted = accepted == nullptr ? 0 : load_l2_int(accepted + b);
    const int first = first_row(b), own_rows = rows(b);
    stage_words(verified.choices, choice + first, own_rows);
    stage_words(verified.logprobs, logprob + first, own_rows);
    if (path != nullptr) {
      stage_words(verified.path, path + b * path_width, path_width);
    } else if (lane == 0) {
      verified.path[0] = 0;
    }
    wait_for_staged();

    const int room = is_done ? 0 : most - e.length - 1;
    e.count = min(e.accepted + 1, max(room, 0));
    e.ends = e.count >= room;
#pragma unroll 1
    for (int base = 0; base < e.count; base += 32) {
      const int i = base + lane;
      bool end = false;
      if (i < e.count && !ignores) {
        const int token = verified.choices[verified.path[i]];
#pragma unroll
        for (int id = 0; id < kEosIds; ++id) end |= token >= 0 && ids[id] == token;
      }
      const unsigned found = __ballot_sync(kAllLanes, end);
      if (found) {
        e.ends = true;
        e.count = base + __ffs(static_cast<int>(found));
      }
    }
    return e;
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
    advance_batch(const int* choice,      // [T], T = B·N1 without row_start
                  const float* logprob,   // [T]
                  const int* path,        // [B, D1] or null
                  const int* accepted,    // [B] or null
                  const uint4* captured,  // [T, C] bf16, C = 8 · vectors, or null
                  int* length,            // in and out [B]
                  int* root,              // in and out [B]
                  int* pending_count,     // in and out [B], null without captured, as the next two
                  int* pending_tokens,    // in and out [B, DM1]
                  uint4* pending_captured,  // in and out [B, DM1, C] bf16
                  int* done,                // in and out [B]
                  const int* limit,         // [B]
                  const int* ignore_eos,    // [B]
                  const int* eos_ids,       // [8]
                  int* step,                // in and out [1]
                  int* ring_tokens,         // out [S, BM, R1], host memory, as all that follow
                  float* ring_logprobs,     // out [S, BM, R1]
                  int* ring_accepted,       // out [S, BM]
                  int* ring_count,          // out [S, BM]
                  int* ring_step,           // out [S]
                  const int* changes,       // [B], null in steps that change no logits
                  int* marks,               // in and out [B, V], null with it
                  const int* row_start,     // [B + 1] or null
                  int* workspace_arrived,   // [1 + B], zeros before and after
                  int batch, int nodes, int path_width, int vectors, int room, int ring_slots,
                  int ring_batch, int ring_width, int extended, int vocab) {
  DYNAMIC_SHARED(int, staged);  // what a warp with a sequence has of it
  __shared__ Emission shared_emission;
  pdl_launch_dependents();
  pdl_wait();
  const Inputs inputs{choice, logprob,    path,    accepted,  pending_count, length,    done,
                      limit,  ignore_eos, eos_ids, row_start, nodes,         path_width};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool drafts = captured != nullptr && pending_captured != nullptr;
  const int now = load_l2_int(step);

  // By one warp, as move_state is.
  const auto write_ring = [&](int b, const Emission& e, const Verified& verified) {
    const int entry = now % ring_slots * ring_batch + b;
#pragma unroll 1
    for (int i = lane; i < e.count; i += 32) {
      const int node = verified.path[i];
      ring_tokens[entry * ring_width + i] = verified.choices[node];
      ring_logprobs[entry * ring_width + i] = verified.logprobs[node];
    }
    if (lane == 0) {
      ring_count[entry] = e.count;
      ring_accepted[entry] = min(e.accepted, e.count);
    }
  };
  const auto move_state = [&](int b, const Emission& e, const Verified& verified) {
    if (e.count == 0) return;
    if (drafts) {
      const Pending pending(extended ? 0 : e.pending, e.count, room);
      int* tokens = pending_tokens + b * room;
#pragma unroll 1
      for (int first = 0; first < pending.count; first += 32) {
        const int i = first + lane, from = i + pending.dropped;
        int token = 0;
        if (i < pending.count) {
          token = from < pending.kept ? tokens[from]
                                      : verified.choices[verified.path[from - pending.kept]];
        }
        __syncwarp();
        if (i < pending.count) tokens[i] = token;
      }
      if (lane == 0) pending_count[b] = pending.count;
    }
    if (lane == 0) {
      if (marks != nullptr && (load_l2_int(changes + b) & kAdjusts) != 0) {
        // A token may come more than once, so one thread counts them in turn.
        int* counts = marks + static_cast<int64_t>(b) * vocab;
        int token = load_l2_int(root + b);
#pragma unroll 1
        for (int i = 0; i < e.count; ++i) {
          counts[token] += 1;
          token = verified.choices[verified.path[i]];
        }
      }
      root[b] = verified.choices[verified.path[e.count - 1]];
      length[b] = e.length + e.count;
      done[b] = e.ends;
    }
  };

  // One warp of a CTA has the CTA's sequence; without captured features each has sequences.
  const int sequences = drafts ? 1 : batch, warps = drafts ? 1 : static_cast<int>(blockDim.x) / 32;
  const Verified verified(staged + (drafts ? 0 : warp * (2 * nodes + path_width)), nodes);
#pragma unroll 1
  for (int i = warp; i < sequences; i += warps) {
    const int b = blockIdx.x + i;
    const Emission e = inputs.emission(b, verified);
    if (blockIdx.y == 0) write_ring(b, e, verified);
    if (!drafts) move_state(b, e, verified);
    if (drafts && lane == 0) shared_emission = e;
    __syncwarp();
  }
  if (drafts) {
    __syncthreads();
    const int b = blockIdx.x;
    const Emission e = shared_emission;
    if (warp == 1) {
      if (is_last_warp_of(workspace_arrived + 1 + b, gridDim.y)) move_state(b, e, verified);
    } else if (warp >= kStateWarps) {
      const Pending pending(extended ? 0 : e.pending, e.count, room);
      uint4* rows = pending_captured + static_cast<int64_t>(b) * room * vectors;
      constexpr int kOthers = 32 * kStateWarps;
      const Threads copying{static_cast<int>(threadIdx.x) - kOthers,
                            static_cast<int>(blockDim.x) - kOthers};
      // Where rows move within the buffer, one CTA has them all and goes from the oldest on; every
      // thread then reads and writes columns of its own.
#pragma unroll 1
      for (int i = e.count > 0 ? blockIdx.y : pending.count; i < pending.count; i += gridDim.y) {
        const int from = i + pending.dropped;
        const uint4* source = rows + static_cast<int64_t>(from) * vectors;
        if (from >= pending.kept) {
          const int64_t row = inputs.first_row(b) + verified.path[from - pending.kept];
          source = captured + row * vectors;
        }
        uint4* const to = rows + static_cast<int64_t>(i) * vectors;
        if (source != to) copy_row(to, source, vectors, copying);
      }
    }
    if (warp > 0 || blockIdx.y > 0) return;
  }

  // Here are the warps that wrote the ring: what they wrote is fenced before they are counted.
  if (!drafts) __syncthreads();
  fence_system();
  if (warp == 0 && is_last_warp_of(workspace_arrived, gridDim.x) && lane == 0) {
    // Others' words, which it has seen counted, come before the step for the host, too.
    if (gridDim.x > 1) fence_system();
    store_system(ring_step + now % ring_slots, now + 1);
    step[0] = now + 1;
  }
}
