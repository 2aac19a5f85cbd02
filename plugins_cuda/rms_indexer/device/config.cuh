// What the kernels of RmsIndexer are specialised by: the struct ``Config``, which the lowering
// writes for each launch (CONFIG). Headers of dense kernels say what they take of it
// (_device/dense_few.cuh, dense_many.cuh, prefill_dense.cuh). The others: kHeads, kWidth, kKeyBytes
// (of a value of a key), kHasNorm, kEps; kFragments (tokens of few rows come as fragments).
#pragma once

CONFIG
