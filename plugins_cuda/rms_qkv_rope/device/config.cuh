// The constants of the kernels of RmsQkvRope: members of ``Config``, a struct that the lowering
// defines for each launch (CONFIG). The headers of dense kernels list those that they use
// (_device/dense_few_pairs.cuh, dense_many.cuh, prefill_heads.cuh). The other members:
//
//   of the layer    kQHeads, kKvHeads, kHeadDim, kHasBias, kHasNorm, kHeadNorms (heads are normed),
//                   kNormRounding, kHeadRounding (of the heads' norms), kEps, kWholeNorms (one of
//                   all heads), kValueNorm (values are normed, without a weight),
//                   kGrowth (positions of the tables behind which a factor of queries by position
//                   stands in cos; 0: none)
//   of the caches   kPageSize, kCodes (e4m3, else bf16)
//   of a CTA        kThreads (of the launch that norms heads)
#pragma once

CONFIG
