"""The host's half of DSA: how each sequence's steps attend, and the graph input that says so.

``runtime/lossy/dsa/state.py`` decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specbuild.runtime.cache.row_placement import RowLayout
from specbuild.runtime.engine_dir.manifest import INDEXER_GROUP, Dsa, Manifest
from specbuild.runtime.lossy.dsa.state import EVERYTHING, Attends, Check, SequenceSelection
from specbuild.runtime.lossy.mode import HostModeRequest
from specbuild.runtime.lossy.verified import Verified
from specbuild.runtime.request import SequenceState


@dataclass(frozen=True)
class _Attending(HostModeRequest):
    """How the sequences of a step attend, in their order."""

    attends: tuple[Attends, ...] = ()


@dataclass(frozen=True)
class _Trial:
    """What a sparse pass sampled at every slot [B, N+1], and the drafts that it accepted."""

    sampled: np.ndarray
    accepted: list[int]


class HostSelections:
    """The selections of the sequences of one loop, by their index."""

    groups = ()

    def __init__(self, manifest: Manifest) -> None:
        assert manifest.dsa is not None
        self._config = manifest.dsa
        self._held: dict[int, SequenceSelection] = {}
        self._trial: _Trial | None = None

    def begin(self, sequence: SequenceState) -> None:
        """Nothing is known of the sequence."""
        self._held[sequence.index] = begun_selection(self._config, sequence)

    def release(self, sequence: SequenceState) -> None:
        """The sequence is done."""
        self._held.pop(sequence.index, None)

    def plan(self, sequences: Sequence[SequenceState], nodes: Sequence[int]) -> _Attending:
        """Settles how each sequence attends, and whether one is checked."""
        del nodes
        attends = tuple(self._held[s.index].begin(s.length) for s in sequences)
        return _Attending(checks="check" in attends, attends=attends)

    def feeds(
        self,
        sequences: Sequence[SequenceState],
        rows: RowLayout,
        plan: HostModeRequest | None,
        *,
        trial: bool,
    ) -> dict[str, np.ndarray]:
        """The pass's budgets. Prompts attend to everything: no fallback repairs a cache."""
        del rows
        budgets = [EVERYTHING] * len(sequences)
        if plan is not None:
            assert isinstance(plan, _Attending)
            for b, (s, attends) in enumerate(zip(sequences, plan.attends, strict=True)):
                budgets[b] = self._held[s.index].budget_of(attends, checking=trial)
        return {f"{INDEXER_GROUP}.top_k": np.array(budgets, np.int32)}

    def received(
        self, sequences: Sequence[SequenceState], plan: HostModeRequest, verified: Verified
    ) -> None:
        """Counts broken lists, and judges a pass that counts by the trial before it."""
        assert isinstance(plan, _Attending)
        for s, broken in zip(sequences, _broken_lists(verified), strict=True):
            self._held[s.index].counters.broken(broken)
        if verified.trial:
            self._trial = _Trial(verified.sampled.copy(), verified.accepted)
            return
        for b, (s, attends) in enumerate(zip(sequences, plan.attends, strict=True)):
            check = self._compared(verified, b) if attends == "check" else None
            self._held[s.index].ended(attends, s.length, check)

    def reverifies_from(self, sequence: SequenceState) -> int:
        """Nothing is entered again."""
        return sequence.length

    def _compared(self, whole: Verified, b: int) -> Check:
        """What the trial of sequence b sampled along the path that counts."""
        trial, accepted = self._trial, whole.accepted[b]
        assert trial is not None
        slots = whole.path[b, : accepted + 1]
        agreed = int((trial.sampled[b, slots] == whole.sampled[b, slots]).sum())
        return Check(len(slots), agreed, accepted, trial.accepted[b])


def _broken_lists(verified: Verified) -> list[int]:
    """Lists of each sequence that broke an invariant, in all layers."""
    lists: list[int] = verified.outputs[f"{INDEXER_GROUP}.violations"].sum(0).tolist()
    return lists


def asked_top_k(config: Dsa, sequence: SequenceState) -> int:
    """The tokens that a row of a request may choose."""
    asked = sequence.request.params.dsa_top_k
    return config.top_k if asked is None else asked


def begun_selection(config: Dsa, sequence: SequenceState) -> SequenceSelection:
    """The state of a sequence that comes, which counts for its statistics."""
    held = SequenceSelection(config, asked_top_k(config, sequence))
    sequence.counters.dsa = held.counters
    return held
