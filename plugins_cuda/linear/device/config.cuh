// What the kernels of Linear are specialised by: the struct ``Config``, which the lowering writes
// for each launch (CONFIG). Headers of dense kernels say what they take of it
// (_device/dense_few.cuh, dense_many.cuh, prefill_gemm.cuh). The others:
//
//   kHasBias, kHasResidual   the op's own; kScale, what multiplies the product
//   kFragments               tokens of few rows come as fragments
//   normed_tokens.cu         kSlices, kTokens (of a CTA), kHasRows (rows are named),
//                            kNormRounding, kEps
//   token_panels.cu          kColumns (tokens of a panel)
#pragma once

CONFIG
