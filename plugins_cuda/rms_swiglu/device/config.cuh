// What the kernels of RmsSwiglu are specialised by: the struct ``Config``, which the lowering
// writes for each launch (CONFIG). Headers of dense kernels say what they take of it
// (_device/dense_few.cuh, dense_many.cuh, prefill_gemm.cuh). The others: kHasBias, kHasNorm,
// kNormRounding, kEps, kActivation (0: SiLU, 1: GELU by tanh).
#pragma once

CONFIG
