// DraftInput for the many rows of a prompt: one warp normalizes one part of a row.
//
//   token_ids … u   see kernel.cu
//
// Grid (rows / WARPS rounded up, parts). A row is read twice, the second time from L2. Sums are
// added as in normed_rows.cuh, so the bits are those of kernel.cu, which has a CTA for each row.
#include "device/part.cuh"

namespace {

constexpr int kPieces = Rows::kPieces, kAtOnce = 4;  // pieces that are loaded at once

// Pass eight values of a lane in each piece to visit(element, values), in order.
template <class Visit>
__device__ __forceinline__ void visit_pieces(const TableRow& source, Visit visit) {
  const auto element_of = [](int piece) {
    return piece * kPieceElements + static_cast<int>(threadIdx.x) % 32 * 8;
  };
#pragma unroll 1
  for (int first = 0; first < kPieces; first += kAtOnce) {
    uint4 held[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int element = element_of(first + i);
      held[i] = make_uint4(0, 0, 0, 0);
      if (element < Config::kWidth) held[i] = load_l2_16(source + element);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i >= kPieces) break;
      visit(element_of(first + i), held[i]);
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Config::kWarps * 32)
    draft_input_of_many(const int* token_ids, const uint16_t* table, const uint16_t* embed_norm,
                        const uint16_t* hidden, const uint16_t* hidden_norm,
                        const uint16_t* residual, const uint16_t* factor, uint16_t* u, int rows) {
  pdl_launch_dependents();
  pdl_wait();
  const int row = static_cast<int>(blockIdx.x) * Config::kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  const Part part(row, blockIdx.y, gridDim.y);
  const TableRow source = part.source(token_ids, table, hidden);
  float sum = 0.0f;
  visit_pieces(source, [&](int, uint4 values) { sum += warp_sum(sum_of_squares(values)); });
  const float scale = rsqrtf(sum * (1.0f / Config::kWidth) + static_cast<float>(Config::kEps));
  const uint16_t* const weight = part.weight(embed_norm, hidden_norm);
  visit_pieces(source, [&](int element, uint4 values) {
    if (element >= Config::kWidth) return;
    const uint4 factors = *reinterpret_cast<const uint4*>(weight + element);
    const uint4 normed = normed_vector<kRounding>(values, factors, scale);
    part.store(u, element / 8, normed, residual, factor);
  });
}
