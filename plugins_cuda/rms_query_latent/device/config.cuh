// What the kernels of RmsQueryLatent are specialised by: the struct ``Config``, which the lowering
// writes for each launch (CONFIG). Headers of dense kernels say what they take of it
// (_device/dense_few_pairs.cuh, dense_many.cuh, prefill_heads.cuh). The others: kQHeads, kHeadDim,
// kLatent (values of a token in the cache), kHasBias, kHasNorm, kEps.
#pragma once

CONFIG
