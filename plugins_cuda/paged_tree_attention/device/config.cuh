// The constants of the kernels of attention: members of ``Config``, a struct that the lowering
// defines for each launch (CONFIG). It has the members that the kernels of the launch use.
//
//   of the layer     kKvHeads and kGroup (query heads of a KV head), kShare (KV heads that read one
//                    of the pools'), kWidth, kWindow (0: none), kScale, kHasSinks
//   of the caches    kCodes (quantized to e4m3, else bf16), kPageSize, kTable (pages of a
//                    sequence), kViews (page tables of a sequence), kWords (of ancestor bits),
//                    kLists (lists of slots of a row)
//   of the launch    kBatch, kLaunchRows, kSequenceRows, kFewRows (sequences with at most this
//                    number of rows have another kernel), kTakesWhole (also whole rows), kEarly
//                    (wide heads load a tile before griddepcontrol.wait)
//   of the cut       kSplit (number of splits), kSlots (states of a row, one per used split),
//                    kContextCtas, kRowCtas, kMeets (the CTAs of a row merge it together)
//   of a CTA         kRows (of a warp), kRowWarps (of a team), kSplitTeams, kHalvesAtOnce, kStages
//                    (of a ring), kKeys (of a prompt's tile), kWarpgroups (attending), kRowGroups
//                    (warpgroups that share a tile run), kSharedBytes, kCtasOfAnSm
#pragma once

CONFIG
