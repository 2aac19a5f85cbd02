// The constants of the kernels of RmsLowRank: members of ``Config``, a struct that the lowering
// defines for each launch (CONFIG). The headers of dense kernels list those that they use
// (_device/dense_few_pairs.cuh, dense_many.cuh, prefill_dense.cuh). The other members: kHasNorm,
// kNormRounding, kEps; of entries.cuh kQuery, kRank, kRope (values of a row's parts), kEntry (of
// the cache), kQueryNorm, kLatentEps, kEntryWarps, kEntrySharedBytes.
#pragma once

CONFIG
