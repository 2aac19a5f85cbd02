// The constants of the kernels of RmsIndexer: members of ``Config``, a struct that the lowering
// defines for each launch (CONFIG). The headers of dense kernels list those that they use
// (_device/dense_few.cuh, dense_many.cuh, prefill_dense.cuh). The other members: kHeads, kWidth,
// kKeyBytes (of a value of a key), kHasNorm, kEps; kFragments (tokens of few rows come as
// fragments).
#pragma once

CONFIG
