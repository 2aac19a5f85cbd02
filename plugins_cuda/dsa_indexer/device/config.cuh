// The constants of the kernels of DsaIndexer: members of ``Config``, a struct that the lowering
// defines for each launch (CONFIG). It has the members that the kernels of the launch use.
//
//   kHeads, kWidth   of an indexer; kKeyBytes (of a value of a key), kPageSize
//   kWords           of ancestor bits
//   kRows            of a sequence that share a reading of the keys
//   kThreads         of a CTA; kSharedBytes
#pragma once

CONFIG
