// The constants of the kernels of HeadChoose: members of ``Config``, a struct that the lowering
// defines for each launch (CONFIG). It has the members that the kernels of the launch use.
//
//   kKBlocks, kTileCount   of the weight; kWeights, its storage
//   kSegments              of the vocabulary, each of kSegmentTiles tiles
//   kTokenTiles            groups of 8 rows of a CTA
//   kLogitDivisor, kLogitCap, kVocab  the epilogue (_device/final_logit.cuh)
//   kernel.cu              kWarps, kDepth (steps in flight), kNormSlices (warps that normalize a
//   row),
//                          kNormRounding, kEps, kSharedBytes
//   panels.cu              kWarps, kTiles (of a warp at once), kDepth, kStages (of panels),
//                          kNormedBytes (of a CTA's panels), kSharedBytes
#pragma once

CONFIG
