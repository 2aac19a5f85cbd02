// What the kernel is specialised by: the struct ``Config``, which the lowering writes (CONFIG).
//
//   kKeyHeads, kValueHeads, kKeyWidth, kValueWidth, kChannels, kTaps, kRowWidth   the layer's sizes
//   kNodes             rows whose factors a slot keeps
//   kHeld, kWords      rows in shared memory at once, words of a row's ancestors
//   kPath              entries of a path that is replayed
//   kStores, kIsTree   whether the launch commits its rows; whether they may be no chain
//   kChunks            whether launches in front have computed the rows in chunks
//   kCtas, kGroups     CTAs of a multiprocessor; groups of lanes that share the rows of a state
//   kWarms             whether L2 is warmed before the grid dependency
//   kSlots             of the pools
//   kBatch, kPlaces    of chunks: sequences of the launch, chunks that the workspaces hold
//   kEps, kSharedBytes
#pragma once

CONFIG
