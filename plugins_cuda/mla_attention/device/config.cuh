// What the kernels of latent attention are specialised by: the struct ``Config``, which the
// lowering writes for each launch (CONFIG). A launch has those that its kernels read.
//
//   of the layer     kQHeads, kKvHeads, kVHeads, kGroup (query heads of a KV head), kWidth and
//                    kVWidth of a head, kEntry (values of a token in the cache), kValue (of these
//                    summed), kWindow, kScale, kHasSinks, kHasBias, kPositions (rows of the rotary
//                    tables)
//   of the caches    kPageSize, kTable (pages of a sequence), kWords (of ancestor bits), kViewed
//                    (slots are no positions)
//   of the launch    kBatch, kLaunchRows, kSequenceRows, kListed (a list of slots stands for the
//                    context)
//   of the cut       kTile (positions of a tile), kSplit, kGroups (of splits), kPlaces (states of a
//                    row), kSlotsInUse (splits that a view fills), kContextCtas; with absorbed
//                    queries kShortContext, kShortSlot, kLongSlot, kMostSlots (tiles of a split)
//   of a CTA         kRows (of a warpgroup that attends), kRowCtas, kMixers (of these warpgroups),
//                    kStages, kTiles and kOwnTiles (of stored keys), kPanels, kHeld (steps whose
//                    weights registers hold), kCtasOfAnSm, kAhead, kEvictFirst, kColumns (of a
//                    value) and kPromptRows; registers of a thread: kCopyRegisters, kKeyRegisters,
//                    kMixRegisters; kSharedBytes
#pragma once

CONFIG
