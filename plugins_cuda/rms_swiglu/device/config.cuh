// The constants of the kernels of RmsSwiglu: members of ``Config``, a struct that the lowering
// defines for each launch (CONFIG). The headers of dense kernels list those that they use
// (_device/dense_few.cuh, dense_many.cuh, prefill_gemm.cuh). The other members: kHasBias, kHasNorm,
// kNormRounding, kEps, kActivation (0: SiLU, 1: GELU by tanh).
#pragma once

CONFIG
