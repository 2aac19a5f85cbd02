// The constants of the kernels: the struct ``Config``, which the lowering writes (CONFIG).
//
//   kKeyHeads, kValueHeads, kKeyWidth, kValueWidth, kChannels, kTaps, kRowWidth   the layer's sizes
//   kNodes             rows whose factors a slot keeps
//   kHeld, kWords      rows in shared memory at once, words of a row's ancestors
//   kPath              entries of a replayed path
//   kStores, kIsTree   whether the launch commits its rows; whether they can be a tree
//   kChunks            whether earlier launches have computed the rows in chunks
//   kCtas, kGroups     CTAs per multiprocessor; groups of lanes that share the rows of a state
//   kWarms             whether a CTA reads its state into L2 before the grid dependency
//   kAhead             distance to the later CTA whose state a CTA reads into L2; 0 for none
//   kSlots             slots of the pools
//   kBatch, kPlaces    for chunks: sequences of the launch, chunks in the workspaces
//   kColumnCtas        CTAs that share the columns of a state
//   kEps, kSharedBytes
#pragma once

CONFIG
