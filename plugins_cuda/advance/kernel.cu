// Advance: one warp determines the emitted tokens of a sequence and writes the ring. Another warp
// updates the state, after all CTAs that copy rows of the sequence have read it. The other warps
// copy. The last sequence signals the step to the host.
//
// It moves 2·C bytes per emitted token (17 KB for three aux layers of GPT-OSS) and a few bytes to
// the host. Memory latencies: one of the inputs, then one of the arrival counts, host memory and
// rows, which overlap.
#include "../_device/arrival.cuh"
#include "../_device/ptx_system.cuh"
#include "../_device/staged_words.cuh"
#include "../_device/step_rows.cuh"

constexpr int kEosIds = 8;
constexpr int kAdjusts = 1;     // the value of runtime/engine_dir/plan.py
constexpr int kStateWarps = 2;  // of a CTA with one sequence: one for the ring, one for the state

// The results of a step for a sequence, in shared memory.
struct Verified {
  int* choices;     // [N1]
  float* logprobs;  // [N1]
  int* path;        // [D1]

  __device__ Verified(int* shared, int nodes)
      : choices(shared),
        logprobs(reinterpret_cast<float*>(shared + nodes)),
        path(shared + 2 * nodes) {}
};

// A sequence's state before the step, the number of emitted tokens, and whether it ends.
struct Emission {
  int length, pending, accepted, count, ends;
};

struct Inputs {
  const int* choice;
  const float* logprob;
  const int* path;           // null: only the root
  const int* accepted;       // null with ``path``
  const int* pending_count;  // null without aux hidden states
  const int* length;
  const int* done;
  const int* limit;
  const int* ignore_eos;
  const int* eos_ids;
  const int* row_start;  // null: each sequence has ``nodes`` rows
  int nodes, path_width;

  // The row of a sequence's slot 0.
  __device__ int first_row(int b) const {
    return row_start == nullptr ? b * nodes : load_l2_int(row_start + b);
  }

  __device__ int rows(int b) const {
    return row_start == nullptr ? nodes : load_l2_int(row_start + b + 1) - first_row(b);
  }

  // One warp calls it.
  __device__ Emission emission(int b, const Verified& verified) const {
    const int lane = threadIdx.x % 32;
    Emission e;
    e.length = load_l2_int(length + b);
    const int max_length = load_l2_int(limit + b), is_done = load_l2_int(done + b);
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

    const int capacity = is_done ? 0 : max_length - e.length - 1;
    e.count = min(e.accepted + 1, max(capacity, 0));
    e.ends = e.count >= capacity;
#pragma unroll 1
    for (int base = 0; base < e.count; base += 32) {
      const int i = base + lane;
      bool end = false;
      if (i < e.count && !ignores) {
        const int token = verified.choices[verified.path[i]];
#pragma unroll
        for (int id = 0; id < kEosIds; ++id) end |= token >= 0 && ids[id] == token;
      }
      const unsigned end_lanes = __ballot_sync(kAllLanes, end);
      if (end_lanes) {
        e.ends = true;
        e.count = base + __ffs(static_cast<int>(end_lanes));
      }
    }
    return e;
  }
};

// The draft's pending rows after this step: the remaining old ones, then the new ones.
struct Pending {
  int kept, dropped, count;  // the oldest ``dropped`` of kept + new rows are discarded

  __device__ Pending(int old_rows, int new_rows, int capacity)
      : kept(old_rows),
        dropped(max(old_rows + new_rows - capacity, 0)),
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
                  int* pending_count,   // in and out [B], null without captured, like the next two
                  int* pending_tokens,  // in and out [B, DM1]
                  uint4* pending_captured,  // in and out [B, DM1, C] bf16
                  int* done,                // in and out [B]
                  const int* limit,         // [B]
                  const int* ignore_eos,    // [B]
                  const int* eos_ids,       // [8]
                  int* step,                // in and out [1]
                  int* ring_tokens,         // out [S, BM, R1], host memory, like all of the ring
                  float* ring_logprobs,     // out [S, BM, R1]
                  int* ring_accepted,       // out [S, BM]
                  int* ring_count,          // out [S, BM]
                  int* ring_step,           // out [S]
                  const int* changes,       // [B], null in steps that change no logits
                  int* marks,               // in and out [B, V], null with ``changes``
                  const int* row_start,     // [B + 1] or null
                  int* workspace_arrived,   // [1 + B], zeros before and after
                  int batch, int nodes, int path_width, int vectors, int capacity, int ring_slots,
                  int ring_batch, int ring_width, int extended, int vocab) {
  DYNAMIC_SHARED(int, staged);  // the Verified of each warp with a sequence
  __shared__ Emission shared_emission;
  pdl_launch_dependents();
  pdl_wait();
  const Inputs inputs{choice, logprob,    path,    accepted,  pending_count, length,    done,
                      limit,  ignore_eos, eos_ids, row_start, nodes,         path_width};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool drafts = captured != nullptr && pending_captured != nullptr;
  const int now = load_l2_int(step);

  // One warp calls it, as move_state.
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
      const Pending pending(extended ? 0 : e.pending, e.count, capacity);
      int* tokens = pending_tokens + b * capacity;
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
        // A token may occur several times, so one thread counts them in sequence.
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

  // One warp of a CTA has the CTA's sequence; without aux hidden states each warp has sequences.
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
      const Pending pending(extended ? 0 : e.pending, e.count, capacity);
      uint4* rows = pending_captured + static_cast<int64_t>(b) * capacity * vectors;
      constexpr int kOthers = 32 * kStateWarps;
      const Threads copying{static_cast<int>(threadIdx.x) - kOthers,
                            static_cast<int>(blockDim.x) - kOthers};
      // If rows move within the buffer, one CTA moves all of them, oldest first. Every thread then
      // reads and writes separate columns.
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

  // These warps wrote the ring; a fence makes their writes visible before they are counted.
  if (!drafts) __syncthreads();
  fence_system();
  if (warp == 0 && is_last_warp_of(workspace_arrived, gridDim.x) && lane == 0) {
    // Writes of other CTAs, which were counted, must become visible to the host before the step.
    if (gridDim.x > 1) fence_system();
    store_system(ring_step + now % ring_slots, now + 1);
    step[0] = now + 1;
  }
}
