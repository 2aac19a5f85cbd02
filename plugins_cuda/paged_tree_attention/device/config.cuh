// The constants of the kernels of attention: members of ``Config``, a struct that the lowering
// defines for each launch (CONFIG). It has the members that the kernels of the launch use.
//
//   of the layer     kKvHeads and kGroup (query heads of a KV head), kShare (KV heads that read one
//                    of the pools'), kWidth, kWindow (0: none), kScale, kHasSinks
//   of the caches    kCodes (e4m3, else bf16), kPageSize, kTable (pages of a sequence), kViews
//                    (page tables of a sequence), kWords (of ancestor bits), kLists (of slots, of a
//                    row)
//   of the launch    kBatch, kLaunchRows, kSequenceRows, kFewRows (of a sequence: another
//   kernel's),
//                    kTakesWhole (also rows without a list)
//   of the cut       kSplit (slots that chunks are dealt to in turn), kSlots (states of a row),
//                    kContextCtas, kRowCtas, kMeets (CTAs of a row join it together)
//   of a CTA         kRows (of a warp), kRowWarps (of a team), kSplitTeams, kHalvesAtOnce, kStages
//                    (of a ring), kKeys (of a prompt's tile), kWarpgroups (that attend), kRowGroups
//                    (of them that share a chain), kSharedBytes, kCtasOfAnSm
#pragma once

CONFIG
