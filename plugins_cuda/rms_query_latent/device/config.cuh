// The constants of the kernels of RmsQueryLatent: members of ``Config``, a struct that the lowering
// defines for each launch (CONFIG). The headers of dense kernels list those that they use
// (_device/dense_few_pairs.cuh, dense_many.cuh, prefill_heads.cuh). The other members: kQHeads,
// kHeadDim, kLatent (values of a token in the cache), kHasBias, kHasNorm, kEps.
#pragma once

CONFIG
