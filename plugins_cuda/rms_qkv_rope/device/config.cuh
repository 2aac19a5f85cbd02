// The constants of the kernels of RmsQkvRope: members of ``Config``, a struct that the lowering
// defines for each launch (CONFIG). The headers of dense kernels list those that they use
// (_device/dense_few_pairs.cuh, dense_many.cuh, prefill_heads.cuh). The other members:
//
//   of the layer    kQHeads, kKvHeads, kHeadDim, kHasBias, kHasNorm, kHeadNorms (norms of heads),
//                   kNormRounding, kHeadRounding (of the heads' norms), kEps, kWholeNorms (one norm
//                   of all heads), kValueNorm (a norm of values, without a weight), kGrowth
//                   (positions of the tables; cos continues with a factor of queries by position;
//                   0: none)
//   of the caches   kPageSize, kCodes (e4m3, else bf16)
//   of a CTA        kThreads (of the launch for norms of heads)
#pragma once

CONFIG
