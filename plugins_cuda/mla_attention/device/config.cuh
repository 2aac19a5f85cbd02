// The constants of the kernels of latent attention: members of ``Config``, a struct that the
// lowering defines for each launch (CONFIG). It has the members that the kernels of the launch use.
//
//   of the layer     kQHeads, kKvHeads, kVHeads, kGroup (query heads of a KV head), kWidth and
//                    kVWidth of a head, kEntry (values of a token in the cache), kValue (of these
//                    summed), kWindow, kScale, kHasSinks, kHasBias, kPositions (rows of the rotary
//                    tables)
//   of the caches    kPageSize, kTable (pages of a sequence), kWords (of ancestor bits), kViewed
//                    (slots are not positions)
//   of the launch    kBatch, kLaunchRows, kSequenceRows, kListed (a list of slots replaces the
//                    context)
//   of the cut       kTile (positions of a tile), kSplit (number of splits), kGroups (of splits),
//                    kPlaces (states of a row), kSplitsInUse (splits that a view fills),
//                    kContextCtas; with absorbed queries kShortContext, kShortSplit, kLongSplit
//   of a CTA         kRows (of an attending warpgroup), kRowCtas, kConsumerWarpgroups (of these
//   warpgroups),
//                    kStages, kTiles and kOwnTiles (of stored keys), kPanels, kHeld (steps whose
//                    weights registers hold), kCtasOfAnSm, kAhead, kEvictFirst, kColumns (of a
//                    value) and kPromptRows; registers of a thread: kCopyRegisters, kKeyRegisters,
//                    kMixRegisters; kSharedBytes
#pragma once

CONFIG
