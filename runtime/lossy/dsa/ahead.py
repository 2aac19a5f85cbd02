"""DSA where steps stay on the device: how each step attends, and what became of it.

The device decides row by row, by the row's position. The host says how many tokens each sequence
may choose in the next step: the device's numbers are written when they change. It says so before
it knows what the steps in flight emit, and reckons with the most that they can: no step that
narrows comes before its checks. Programs that narrow are launched as soon as a row can have reached
the threshold; before that, and where all sequences have fallen back, the ones that do not, which
have fewer launches and the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from specbuild.runtime.decode.device_rows import LIST_BUDGET, SAMPLED_BUDGET
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.executors.executor import ResidentExecutor
from specbuild.runtime.lossy.dsa.state import EVERYTHING, Attends, Check, SequenceSelection
from specbuild.runtime.request import SequenceState


@dataclass(frozen=True)
class StepSelections:
    """How the sequences of a step attend, by their index, and what its program does.

    ``narrows``: rows may attend to what indexers choose; ``checks``: the tree is verified twice.
    """

    attends: Mapping[int, Attends] = field(default_factory=dict)
    narrows: bool = False
    checks: bool = False


class ResidentSelections:
    """The selections of the sequences of one generation, by their index."""

    def __init__(self, executor: ResidentExecutor, manifest: Manifest) -> None:
        assert manifest.dsa is not None
        self._executor = executor
        self._config = manifest.dsa
        self._held: dict[int, SequenceSelection] = {}
        self._told: dict[str, np.ndarray] = {}

    def begin(self, sequence: SequenceState) -> None:
        """Prefill is through."""
        held = SequenceSelection(self._config, self._top_k(sequence))
        sequence.tally.dsa, self._held[sequence.index] = held.tally, held

    def release(self, sequence: SequenceState) -> None:
        """The sequence is done."""
        self._held.pop(sequence.index, None)

    def expected(self, sequences: Sequence[SequenceState], *, depth: int) -> StepSelections:
        """What a first step will be, for what it can have ready; nothing is settled."""
        narrows = any(self._reaches(s, depth) for s in sequences if self._top_k(s) > 0)
        return StepSelections({}, narrows, narrows and self._config.check_interval > 0)

    def plan(self, sequences: Sequence[SequenceState], *, ahead: int, depth: int) -> StepSelections:
        """How the sequences in slots 0, 1, … attend in the next step; the device is told.

        The steps in flight emit up to ``ahead`` tokens, and its tree has ``depth`` levels.
        """
        attends: dict[int, Attends] = {}
        counted = np.full(len(sequences), EVERYTHING, np.int32)
        sampled, narrows = counted.copy(), False
        for slot, s in enumerate(sequences):
            held = self._held.get(s.index)
            if held is None:
                continue
            found = attends[s.index] = held.begin(s.known - 1 + ahead)
            # Below the threshold a tree's deepest nodes may have reached it.
            counted[slot] = held.budget if found in ("narrowed", "whole") else EVERYTHING
            sampled[slot] = EVERYTHING if found == "fallback" else held.budget
            narrows = narrows or (counted[slot] != EVERYTHING and self._reaches(s, ahead + depth))
        checks = "check" in attends.values()
        if narrows or checks:
            self._tell(LIST_BUDGET, counted)
        if checks:
            self._tell(SAMPLED_BUDGET, sampled)
        return StepSelections(attends, narrows or checks, checks)

    def received(
        self,
        sequence: SequenceState,
        attends: Attends,
        *,
        broken: int = 0,
        check: Sequence[int] = (),
    ) -> None:
        """A step is through; the sequence's length is still that of before it.

        ``broken`` lists were found in its pass that counts; ``check`` is its ``ring.checks``.
        """
        held, passes, outcome = self._held[sequence.index], [broken], None
        if check:
            tokens, agreed, accepted_whole, accepted_narrowed, also_broken = check
            passes.append(also_broken)
            if attends == "check":
                outcome = Check(tokens, agreed, accepted_whole, accepted_narrowed)
        held.ended(attends, sequence.length, outcome)
        held.tally.broken_launches += sum(lists > 0 for lists in passes)
        held.tally.broken_lists += sum(passes)

    def _reaches(self, sequence: SequenceState, further: int) -> bool:
        """Whether a row may stand at the threshold."""
        return sequence.known - 1 + further >= self._config.threshold

    def _tell(self, port: str, budgets: np.ndarray) -> None:
        if port not in self._told or not np.array_equal(budgets, self._told[port]):
            self._executor.write(port, budgets)
            self._told[port] = budgets

    def _top_k(self, sequence: SequenceState) -> int:
        asked = sequence.request.params.dsa_top_k
        return self._config.top_k if asked is None else asked
