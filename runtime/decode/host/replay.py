"""Replays a preempted sequence on an executor that is not batch-invariant.

A near tie may be resolved differently when the sequence is decoded again. Then the emitted token
replaces the sampled one, and drafts after it are not accepted.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbuild.runtime.lossy.verified import Verified
from specbuild.runtime.request import SequenceState


def replace_replayed(sequences: Sequence[SequenceState], verified: Verified) -> Verified:
    """Return the results of a step with replayed tokens replaced by the tokens emitted before."""
    sampled, path, accepted = verified.sampled, verified.path, verified.accepted
    for b, sequence in enumerate(sequences):
        count = min(sequence.replay_remaining, accepted[b] + 1)
        slots = path[b, :count]
        emitted = sequence.ids[sequence.num_tokens : sequence.num_tokens + count]
        differing = (sampled[b, slots] != emitted).nonzero()[0]
        if len(differing):
            sampled, path, accepted = sampled.copy(), path.copy(), list(accepted)
            first = accepted[b] = int(differing[0])
            sampled[b, slots[first]] = emitted[first]
            path[b, first + 1 :] = -1
    return verified._replace(sampled=sampled, path=path, accepted=accepted)
