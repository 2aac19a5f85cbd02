// The constants of the kernels of HeadScreen: members of ``Config``, a struct that the lowering
// defines for each launch (CONFIG). It has the members that the kernels of the launch use.
//
//   kKBlocks, kTileCount   of the weight; kWeights, the storage of it or of its int8 form
//   kSegments              of the vocabulary, each of kSegmentTiles tiles
//   kTokenTiles            groups of 8 rows of a CTA
//   kLogitDivisor, kLogitCap, kVocab  the epilogue (_device/final_logit.cuh)
//   of a CTA               kWarps, kDepth (steps in flight), kNormSlices (warps that normalize a
//   row),
//                          kNormRounding, kEps, kSharedBytes; kCtaTiles
#pragma once

CONFIG
