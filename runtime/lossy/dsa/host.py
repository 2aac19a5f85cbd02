"""The host's half of DSA: how each sequence's steps attend, and the graph input that says so.

``runtime/lossy/dsa/state.py`` decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specbuild.runtime.engine_dir.manifest import INDEXER_GROUP, Manifest
from specbuild.runtime.lossy.dsa.state import EVERYTHING, Attends, Check, SequenceSelection
from specbuild.runtime.lossy.verified import Accepted, Verified
from specbuild.runtime.request import SequenceState


@dataclass(frozen=True)
class _SparsePass:
    """What a sparse pass sampled at every slot [N + 1] of a sequence, and the drafts accepted."""

    sampled: np.ndarray
    accepted: int


class Selections:
    """The selections of the sequences of one generation, by their index."""

    def __init__(self, manifest: Manifest) -> None:
        assert manifest.dsa is not None
        self._config = manifest.dsa
        self._held: dict[int, SequenceSelection] = {}
        self._attends: dict[int, Attends] = {}
        self._sparse_passes: dict[int, _SparsePass] = {}

    def release(self, sequence: SequenceState) -> None:
        """The sequence is done."""
        self._held.pop(sequence.index, None)
        self._attends.pop(sequence.index, None)

    def begin(self, sequences: Sequence[SequenceState]) -> bool:
        """Settles how each sequence attends in the step to come; whether one is checked."""
        for s in sequences:
            self._attends[s.index] = self._of(s).begin(s.length)
        return "check" in (self._attends[s.index] for s in sequences)

    def feeds(
        self, sequences: Sequence[SequenceState], *, prompts: bool = False
    ) -> dict[str, np.ndarray]:
        """The launch's budgets. Prompts attend to everything: no fallback repairs a cache."""
        budgets = [EVERYTHING if prompts else self._budget(s) for s in sequences]
        return {f"{INDEXER_GROUP}.top_k": np.array(budgets, np.int32)}

    def note(self, sequences: Sequence[SequenceState], outputs: Mapping[str, np.ndarray]) -> None:
        """Counts the lists of a launch that broke an invariant."""
        broken = outputs[f"{INDEXER_GROUP}.violations"].sum(0).tolist()
        for sequence, lists in zip(sequences, broken, strict=True):
            counters = self._of(sequence).counters
            counters.broken_launches += lists > 0
            counters.broken_lists += lists

    def note_sparse(
        self, sequences: Sequence[SequenceState], sparse: Verified, paths: Accepted
    ) -> None:
        """What a sparse pass gave; the sequences that are checked turn whole."""
        for b, s in enumerate(sequences):
            if self._attends[s.index] == "check":
                self._sparse_passes[s.index] = _SparsePass(
                    sparse.sampled[b].copy(), paths.accepted[b]
                )

    def judge(self, sequences: Sequence[SequenceState], whole: Verified, paths: Accepted) -> None:
        """What the pass that counts gave, against the one before it where there was one."""
        for b, s in enumerate(sequences):
            sparse, check = self._sparse_passes.pop(s.index, None), None
            if sparse is not None:
                accepted = paths.accepted[b]
                slots = paths.path[b, : accepted + 1]
                agreed = int((sparse.sampled[slots] == whole.sampled[b, slots]).sum())
                check = Check(len(slots), agreed, accepted, sparse.accepted)
            self._of(s).ended(self._attends[s.index], s.length, check)

    def _budget(self, sequence: SequenceState) -> int:
        sparse = self._of(sequence).budget
        attends = self._attends[sequence.index]
        checked = attends == "check" and sequence.index not in self._sparse_passes
        # Below the threshold a tree's deepest nodes may have reached it.
        return sparse if attends in ("sparse", "whole") or checked else EVERYTHING

    def _of(self, sequence: SequenceState) -> SequenceSelection:
        held = self._held.get(sequence.index)
        if held is None:
            asked = sequence.request.params.dsa_top_k
            top_k = self._config.top_k if asked is None else asked
            held = self._held[sequence.index] = SequenceSelection(self._config, top_k)
            sequence.counters.dsa = held.counters
        return held
