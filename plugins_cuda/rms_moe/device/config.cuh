// The constants of the kernels of RmsMoe: members of ``Config``, a struct that the lowering defines
// for each launch (CONFIG). It has the members that the kernels of the launch use.
//
//   of the layer    kHidden, kInner, kExperts, kTopK, kWeights (how a matrix of experts is
//                   stored), kActivation (gated.cuh; kAlpha, kLimit), kNormRounding, kEps,
//                   kRouterNorm (the router's input has another norm), kResidual (x is added)
//   of selection    kRounded (logits, to bf16), kScored (scored_choice.cuh selects experts, which
//                   reads kGating, kGroups, kGroupsChosen, kGroupBest, kScaling, kSharedExperts;
//                   otherwise rounded_choice.cuh), kScores (values before the logits), kFactors
//                   (values before the experts' factors), kGates (values before the logits of
//                   gates of shared experts), kSharedGates (their number)
//   of the launch   kRows (of the bucket), kSequences
//   of decoding     kRouterExperts and kRouterWarps of a CTA, kStaged (router weights); kCtas,
//                   kWarps, kRingStages, kPieces (of a stage), kTiles (of a group),
//                   kSlices (of K in gate/up), kPassRows (of one pass over weights), kPlaces (for
//                   rows in shared memory), kRowsResident (all have a place), kStaticBytes,
//                   kSharedBytes, kAddThreads, kAddColumns
//   of prompts      kRouterRows (of a CTA); those of _device/prefill_gemm.cuh; kSteps (of a packed
//                   tile, 16 mma rows × 32 columns each), kMaxTiles (of tokens, for any routing);
//                   those of prefill_few.cuh
#pragma once

CONFIG
