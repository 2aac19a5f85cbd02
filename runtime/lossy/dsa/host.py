"""DSA for steps that the host runs: how each sequence attends, and the graph input for it.

The decisions are in ``runtime/lossy/dsa/state.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specbuild.runtime.cache.row_placement import RowLayout
from specbuild.runtime.engine_dir.manifest import INDEXER_GROUP, Dsa, Manifest
from specbuild.runtime.lossy.dsa.state import EVERYTHING, Attends, Check, SequenceSelection
from specbuild.runtime.lossy.mode import HostModeRequest, Verified
from specbuild.runtime.request import SequenceState


@dataclass(frozen=True)
class _Attending(HostModeRequest):
    """How the sequences of a step attend, in their order."""

    attends: tuple[Attends, ...] = ()


@dataclass(frozen=True)
class _Trial:
    """A sparse pass: its sampled token at each slot [B, N+1], and its accepted draft tokens."""

    sampled: np.ndarray
    accepted: list[int]


class HostSelections:
    """The selections of the sequences of one loop, by sequence index."""

    groups = ()

    def __init__(self, manifest: Manifest) -> None:
        assert manifest.dsa is not None
        self._config = manifest.dsa
        self._selections: dict[int, SequenceSelection] = {}
        self._trial: _Trial | None = None

    def begin(self, sequence: SequenceState) -> None:
        """See :class:`HostMode`."""
        self._selections[sequence.index] = new_selection(self._config, sequence)

    def release(self, sequence: SequenceState) -> None:
        """See :class:`HostMode`."""
        self._selections.pop(sequence.index, None)

    def request_step(self, sequences: Sequence[SequenceState], nodes: Sequence[int]) -> _Attending:
        """Decide how each sequence attends, and whether the step is a check."""
        del nodes
        attends = tuple(self._selections[s.index].begin(s.length) for s in sequences)
        return _Attending(checks="check" in attends, attends=attends)

    def feeds(
        self,
        sequences: Sequence[SequenceState],
        rows: RowLayout,
        mode_request: HostModeRequest | None,
        *,
        trial: bool,
    ) -> dict[str, np.ndarray]:
        """Return the budgets of a pass. Prompts attend to everything, since no fallback repairs a
        cache.
        """
        del rows
        budgets = [EVERYTHING] * len(sequences)
        if mode_request is not None:
            assert isinstance(mode_request, _Attending)
            for b, (s, attends) in enumerate(zip(sequences, mode_request.attends, strict=True)):
                budgets[b] = self._selections[s.index].budget_of(attends, checking=trial)
        return {f"{INDEXER_GROUP}.top_k": np.array(budgets, np.int32)}

    def received(
        self, sequences: Sequence[SequenceState], mode_request: HostModeRequest, verified: Verified
    ) -> None:
        """Count broken lists, and compare a check's final pass with the trial before it."""
        assert isinstance(mode_request, _Attending)
        for s, broken in zip(sequences, _broken_lists(verified), strict=True):
            self._selections[s.index].counters.broken(broken)
        if verified.trial:
            self._trial = _Trial(verified.sampled.copy(), verified.accepted)
            return
        for b, (s, attends) in enumerate(zip(sequences, mode_request.attends, strict=True)):
            check = self._compared(verified, b) if attends == "check" else None
            self._selections[s.index].ended(attends, s.length, check)

    def reverifies_from(self, sequence: SequenceState) -> int:
        """The length of the sequence, since no position is computed again."""
        return sequence.length

    def _compared(self, whole: Verified, b: int) -> Check:
        """Compare the trial of sequence b with the final pass, along the accepted path."""
        trial, accepted = self._trial, whole.accepted[b]
        assert trial is not None
        slots = whole.path[b, : accepted + 1]
        agreed = int((trial.sampled[b, slots] == whole.sampled[b, slots]).sum())
        return Check(len(slots), agreed, accepted, trial.accepted[b])


def _broken_lists(verified: Verified) -> list[int]:
    """Return the number of broken lists of each sequence, summed over layers."""
    lists: list[int] = verified.outputs[f"{INDEXER_GROUP}.violations"].sum(0).tolist()
    return lists


def requested_top_k(config: Dsa, sequence: SequenceState) -> int:
    """Return the number of tokens that a row of a request may select."""
    requested = sequence.request.params.dsa_top_k
    return config.top_k if requested is None else requested


def new_selection(config: Dsa, sequence: SequenceState) -> SequenceSelection:
    """Return the state of a new sequence, and attach its counters to the sequence."""
    selection = SequenceSelection(config, requested_top_k(config, sequence))
    sequence.counters.dsa = selection.counters
    return selection
