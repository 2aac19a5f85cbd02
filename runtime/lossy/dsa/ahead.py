"""DSA where steps stay on the device: how each step attends, and what became of it.

The device decides row by row, by the row's position. The host says how many tokens each sequence
may choose in the next step: the device's numbers are written when they change. It says so before
it knows what the steps in flight emit, and reckons with the most that they can: no sparse step
comes before its checks. Sparse programs are launched as soon as a row can have reached the
threshold; before that, and where all sequences have fallen back, the others where the engine has
one, which have fewer launches and the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.engine_dir.plan import CHECK_BUDGET, LIST_BUDGET
from specbuild.runtime.executors.executor import DeviceExecutor, StepResult
from specbuild.runtime.lossy.dsa.host import asked_top_k, begun_selection
from specbuild.runtime.lossy.dsa.state import EVERYTHING, Attends, Check, SequenceSelection
from specbuild.runtime.lossy.mode import ModeRequest, StepAhead
from specbuild.runtime.request import SequenceState


@dataclass(frozen=True)
class StepSelections(ModeRequest):
    """How the sequences of a step attend, by their index."""

    attends: Mapping[int, Attends] = field(default_factory=dict)


class DeviceSelections:
    """The selections of the sequences of one generation, by their index."""

    def __init__(self, executor: DeviceExecutor, manifest: Manifest) -> None:
        assert manifest.dsa is not None
        self._executor = executor
        self._config = manifest.dsa
        self._held: dict[int, SequenceSelection] = {}
        self._told: dict[str, np.ndarray] = {}
        self._checked = executor.port(CHECK_BUDGET) is not None

    def begin(self, sequence: SequenceState, row: int) -> None:
        """Prefill is through."""
        del row
        self._held[sequence.index] = begun_selection(self._config, sequence)

    def release(self, sequence: SequenceState) -> None:
        """The sequence is done."""
        self._held.pop(sequence.index, None)

    def expected(self, ahead: StepAhead) -> StepSelections:
        """What a first step will be, for what it can have ready; nothing is settled."""
        able = [s for s in ahead.rows.values() if asked_top_k(self._config, s) > 0]
        sparse = any(self._reaches(s, ahead.depth) for s in able)
        return StepSelections(sparse=sparse, checks=sparse and self._config.check_interval > 0)

    def plan(self, ahead: StepAhead) -> StepSelections:
        """How the sequences attend in the next step; the device is told, by row."""
        further = ahead.most_emitted
        attends: dict[int, Attends] = {}
        counted = np.full(ahead.batch, EVERYTHING, np.int32)
        sampled, sparse = counted.copy(), False
        for row, s in ahead.rows.items():
            held = self._held[s.index]
            found = attends[s.index] = held.begin(s.num_tokens - 1 + further)
            counted[row] = held.budget_of(found)
            sampled[row] = held.budget_of(found, checking=True)
            reached = self._reaches(s, further + ahead.depth)
            sparse = sparse or (counted[row] != EVERYTHING and reached)
        checks = "check" in attends.values()
        # Whatever the step is for, its program may be a sparse one, or one that checks.
        self._tell(LIST_BUDGET, counted)
        if self._checked:
            self._tell(CHECK_BUDGET, sampled)
        return StepSelections(sparse=sparse or checks, checks=checks, attends=attends)

    def received(
        self, sequence: SequenceState, plan: ModeRequest, result: StepResult, row: int
    ) -> None:
        """Counts broken lists, and judges a check by the step's ``ring.checks``."""
        assert isinstance(plan, StepSelections)
        held, attends, outcome = self._held[sequence.index], plan.attends[sequence.index], None
        passes = [result.broken[row] if plan.sparse else 0]
        if plan.checks:
            tokens, agreed, accepted_whole, accepted_narrowed, also_broken = result.checks[row]
            passes.append(also_broken)
            if attends == "check":
                outcome = Check(tokens, agreed, accepted_whole, accepted_narrowed)
        held.ended(attends, sequence.length, outcome)
        for lists in passes:
            held.counters.broken(lists)

    def _reaches(self, sequence: SequenceState, further: int) -> bool:
        """Whether a row may stand at the threshold."""
        return sequence.num_tokens - 1 + further >= self._config.threshold

    def _tell(self, port: str, budgets: np.ndarray) -> None:
        if port not in self._told or not np.array_equal(budgets, self._told[port]):
            self._executor.write(port, budgets)
            self._told[port] = budgets
