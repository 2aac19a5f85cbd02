// What the kernels of DsaIndexer are specialised by: the struct ``Config``, which the lowering
// writes for each launch (CONFIG). A launch has those that its kernels read.
//
//   kHeads, kWidth   of an indexer; kKeyBytes (of a value of a key), kPageSize
//   kWords           of ancestor bits
//   kRows            of a sequence that share a reading of the keys
//   kThreads         of a CTA; kSharedBytes
#pragma once

CONFIG
