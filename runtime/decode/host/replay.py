"""A restored sequence on a machine whose bits depend on neighbours: its record stands.

There a near tie may fall the other way when it is decoded again. The record is continued: what was
sampled otherwise is replaced by what was emitted, and drafts behind it are not accepted.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbuild.runtime.lossy.verified import Verified
from specbuild.runtime.request import SequenceState


def replace_replayed(sequences: Sequence[SequenceState], verified: Verified) -> Verified:
    """What a step gives where sequences must emit again what they emitted before."""
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
