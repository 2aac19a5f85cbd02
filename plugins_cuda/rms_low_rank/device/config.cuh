// What the kernels of RmsLowRank are specialised by: the struct ``Config``, which the lowering
// writes for each launch (CONFIG). Headers of dense kernels say what they take of it
// (_device/dense_few_pairs.cuh, dense_many.cuh, prefill_dense.cuh). The others: kHasNorm,
// kNormRounding, kEps; of entries.cuh kQuery, kRank, kRope (values of a row's
// parts), kEntry (of the cache), kQueryNorm, kLatentEps, kEntryWarps, kEntrySharedBytes.
#pragma once

CONFIG
