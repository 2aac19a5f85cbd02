"""DSA for steps that stay on the device: the budgets of each step, and its results.

The device selects by the position of each row. The host writes the number of tokens that each
sequence may select in the next step, and writes it only when it changes. At that time the host does
not know the tokens of the steps in flight. It assumes the maximum, so that no sparse step runs
before its checks. A sparse program is launched as soon as a row may have reached the threshold.
Otherwise, and while all sequences are in fallback, the engine's other programs run, if it has any:
they have fewer launches and the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.engine_dir.plan import CHECK_BUDGET, LIST_BUDGET
from specbuild.runtime.executors.executor import DeviceExecutor, StepResult
from specbuild.runtime.lossy.dsa.host import new_selection, requested_top_k
from specbuild.runtime.lossy.dsa.state import EVERYTHING, Attends, Check, SequenceSelection
from specbuild.runtime.lossy.mode import ModeRequest, StepAhead
from specbuild.runtime.request import SequenceState


@dataclass(frozen=True)
class StepSelections(ModeRequest):
    """How the sequences of a step attend, by sequence index."""

    attends: Mapping[int, Attends] = field(default_factory=dict)


class DeviceSelections:
    """The selections of the sequences of one generation, by sequence index."""

    def __init__(self, executor: DeviceExecutor, manifest: Manifest) -> None:
        assert manifest.dsa is not None
        self._executor = executor
        self._config = manifest.dsa
        self._selections: dict[int, SequenceSelection] = {}
        self._written: dict[str, np.ndarray] = {}
        self._has_checks = executor.port(CHECK_BUDGET) is not None

    def begin(self, sequence: SequenceState, row: int) -> None:
        """Add a sequence at the end of its prefill."""
        del row
        self._selections[sequence.index] = new_selection(self._config, sequence)

    def release(self, sequence: SequenceState) -> None:
        """Forget a finished sequence."""
        self._selections.pop(sequence.index, None)

    def expected(self, ahead: StepAhead) -> StepSelections:
        """Return the request of a probable first step, without changing any state."""
        able = [s for s in ahead.rows.values() if requested_top_k(self._config, s) > 0]
        sparse = any(self._reaches(s, ahead.depth) for s in able)
        return StepSelections(sparse=sparse, checks=sparse and self._config.check_interval > 0)

    def request_step(self, ahead: StepAhead) -> StepSelections:
        """Decide how the sequences attend in the next step, and write their budgets by row."""
        max_new = ahead.most_emitted
        attends: dict[int, Attends] = {}
        list_budgets = np.full(ahead.batch, EVERYTHING, np.int32)
        check_budgets, sparse = list_budgets.copy(), False
        for row, s in ahead.rows.items():
            selection = self._selections[s.index]
            mode = attends[s.index] = selection.begin(s.num_tokens - 1 + max_new)
            list_budgets[row] = selection.budget_of(mode)
            check_budgets[row] = selection.budget_of(mode, checking=True)
            reached = self._reaches(s, max_new + ahead.depth)
            sparse = sparse or (list_budgets[row] != EVERYTHING and reached)
        checks = "check" in attends.values()
        # The program of any step may be sparse or contain a check, so both budgets are always
        # valid.
        self._write_if_changed(LIST_BUDGET, list_budgets)
        if self._has_checks:
            self._write_if_changed(CHECK_BUDGET, check_budgets)
        return StepSelections(sparse=sparse or checks, checks=checks, attends=attends)

    def received(
        self, sequence: SequenceState, mode_request: ModeRequest, result: StepResult, row: int
    ) -> None:
        """Count broken lists, and compare the passes of a check by the step's ``ring.checks``."""
        assert isinstance(mode_request, StepSelections)
        selection, attends, outcome = (
            self._selections[sequence.index],
            mode_request.attends[sequence.index],
            None,
        )
        passes = [result.broken[row] if mode_request.sparse else 0]
        if mode_request.checks:
            tokens, agreed, accepted_whole, accepted_narrowed, broken_in_check = result.checks[row]
            passes.append(broken_in_check)
            if attends == "check":
                outcome = Check(tokens, agreed, accepted_whole, accepted_narrowed)
        selection.ended(attends, sequence.length, outcome)
        for lists in passes:
            selection.counters.broken(lists)

    def _reaches(self, sequence: SequenceState, max_new: int) -> bool:
        """Return whether a row may have reached the threshold."""
        return sequence.num_tokens - 1 + max_new >= self._config.threshold

    def _write_if_changed(self, port: str, budgets: np.ndarray) -> None:
        if port not in self._written or not np.array_equal(budgets, self._written[port]):
            self._executor.write(port, budgets)
            self._written[port] = budgets
