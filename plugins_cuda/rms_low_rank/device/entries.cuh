// The epilogue of RmsLowRank: norms of a row's projected parts, RoPE of the shared key, and the
// write of the entry to its cache slot. Both norms cast before the multiplication by their weight.
//
// Config: kQuery, kRank, kRope, kEntry, kQueryNorm, kLatentEps, kEntryWarps, kEntrySharedBytes.
#pragma once

#include "../../_device/normed_rows.cuh"
#include "../../_device/ptx_load.cuh"
#include "config.cuh"

constexpr int kEntryThreads = Config::kEntryWarps * 32, kHalf = Config::kRope / 2;

template <int width>
using Part = NormedRows<width, Config::kEntryWarps, NormRounding::kCastFirst>;

constexpr int kQueryShared = Config::kQueryNorm != 0 ? Part<Config::kQuery>::bytes(1) : 0;
constexpr int kLatentShared = Part<Config::kRank>::bytes(1);
constexpr int kEntryShared = kQueryShared > kLatentShared ? kQueryShared : kLatentShared;
static_assert(Config::kQuery % 8 == 0 && Config::kRank % 8 == 0 && Config::kEntry % 8 == 0,
              "parts are copied in vectors of 16 bytes");

// Normalize a part of a row; the norm's weight was requested before griddepcontrol.wait.
template <class Normed>
__device__ __forceinline__ void write_normed(const Normed& normed, const uint16_t* part,
                                             uint16_t* to) {
  normed.read(1, [&](int) { return part; });
  cp_async_wait<0>();
  __syncthreads();
  normed.norm(1, static_cast<float>(Config::kLatentEps));
  __syncthreads();
  for (int i = threadIdx.x; i < Normed::kElements / 8; i += kEntryThreads) {
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(normed.rows)[i];
  }
}

__device__ __forceinline__ void write_turned(const uint16_t* part, const float* cos,
                                             const float* sin, int position, uint16_t* to) {
  for (int i = threadIdx.x; i < kHalf; i += kEntryThreads) {
    const int64_t entry = static_cast<int64_t>(position) * kHalf + i;
    const float c = load_constant_float(cos + entry), s = load_constant_float(sin + entry);
    const float a = bf16_to_float(load_l2_bf16(part + i));
    const float b = bf16_to_float(load_l2_bf16(part + kHalf + i));
    to[i] = float_to_bf16(a * c - b * s);
    to[kHalf + i] = float_to_bf16(b * c + a * s);
  }
}

// The outputs of a row's parts, and the tables that they need.
struct EntryTensors {
  const uint16_t* q_norm;
  const uint16_t* latent_norm;
  const float* cos;
  const float* sin;
  const int* positions;
  const int* write_slot;
  uint16_t* c_pool;
  uint16_t* q;
  const uint16_t* projected;
};

// Grid (rows, 2): the input of the queries, then the entry.
__device__ __forceinline__ void write_entries(const EntryTensors& in, unsigned char* shared) {
  static_assert(kEntryShared == Config::kEntrySharedBytes, "as the launch says");
  const int64_t row = blockIdx.x;
  const uint16_t* const projected =
      in.projected + row * (Config::kQuery + Config::kRank + Config::kRope);
  if (blockIdx.y == 0) {
    uint16_t* const to = in.q + row * Config::kQuery;
    if constexpr (Config::kQueryNorm != 0) {
      const Part<Config::kQuery> normed(shared, 1);
      normed.fetch_weight(in.q_norm);
      cp_async_commit();
      pdl_wait();
      pdl_launch_dependents();
      write_normed(normed, projected, to);
    } else {
      pdl_wait();
      pdl_launch_dependents();
      for (int i = threadIdx.x; i < Config::kQuery / 8; i += kEntryThreads) {
        reinterpret_cast<uint4*>(to)[i] = load_l2_16(projected + 8 * i);
      }
    }
    return;
  }
  const Part<Config::kRank> normed(shared, 1);
  normed.fetch_weight(in.latent_norm);
  cp_async_commit();
  pdl_wait();
  pdl_launch_dependents();
  uint16_t* const to =
      in.c_pool + static_cast<int64_t>(load_l2_int(in.write_slot + row)) * Config::kEntry;
  const uint16_t* const part = projected + Config::kQuery;
  write_turned(part + Config::kRank, in.cos, in.sin, load_l2_int(in.positions + row),
               to + Config::kRank);
  for (int i = Config::kRank + Config::kRope + threadIdx.x; i < Config::kEntry;
       i += kEntryThreads) {
    to[i] = 0;
  }
  write_normed(normed, part, to);
}
