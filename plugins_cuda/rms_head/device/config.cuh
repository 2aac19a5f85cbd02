// What the kernels of RmsHead are specialised by: the struct ``Config``, which the lowering writes
// for each launch (CONFIG). A launch has those that its kernels read.
//
//   kKBlocks, kTileCount   of the weight; kWeights, how it is stored
//   kSegments              of the vocabulary, each of kSegmentTiles tiles
//   kTokenTiles            groups of 8 rows of a CTA
//   kLogitDivisor, kLogitCap, kVocab  what becomes of sums (_device/final_logit.cuh)
//   kernel.cu              kWarps, kDepth (steps in flight), kNormSlices (warps that norm a row),
//                          kNormRounding, kEps, kSharedBytes
//   panels.cu              kWarps, kTiles (of a warp at once), kDepth, kStages (panels' places),
//                          kNormedBytes (of a CTA's panels), kSharedBytes
#pragma once

CONFIG
