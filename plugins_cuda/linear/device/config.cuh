// The constants of the kernels of Linear: members of ``Config``, a struct that the lowering defines
// for each launch (CONFIG). The headers of dense kernels list those that they use
// (_device/dense_few.cuh, dense_many.cuh, prefill_gemm.cuh). The other members:
//
//   kHasBias, kHasResidual   the op's own; kScale, what multiplies the product
//   kFragments               tokens of few rows are fragments
//   normed_tokens.cu         kSlices, kTokens (of a CTA), kHasRows (rows are selected),
//                            kNormRounding, kEps
//   token_panels.cu          kColumns (tokens of a panel)
#pragma once

CONFIG
