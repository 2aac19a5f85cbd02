"""The host's part of DSA on a device: sparse sequences, checks, and counters."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from toy_model import toy_manifest

from specbuild.runtime.decode.device.flights import StepInFlight, StepTimer
from specbuild.runtime.decode.device.stepper import DeviceStepper
from specbuild.runtime.engine_dir.manifest import DraftShape, Dsa
from specbuild.runtime.engine_dir.plan import LIST_BUDGET
from specbuild.runtime.executors.executor import StepResult
from specbuild.runtime.lossy.dsa.ahead import DeviceSelections, StepSelections
from specbuild.runtime.lossy.mode import StepAhead


class Told(dict[str, list[int]]):
    """An executor that records what is written to its ports."""

    def write(self, port: str, values: np.ndarray) -> None:
        self[port] = values.tolist()

    def port(self, name: str) -> None:
        """Return None: no program checks."""


def selections(**changes: Any) -> tuple[DeviceSelections, Told, Any]:
    """Return the state of a mode with a threshold of 100 tokens and one sequence."""
    dsa = Dsa(
        top_k=16, threshold=100, first_tokens=4, recent_tokens=8, min_agreement=0.75,
        check_interval=5,
    )  # fmt: skip
    told = Told()
    found = DeviceSelections(told, replace(toy_manifest(), dsa=replace(dsa, **changes)))  # type: ignore[arg-type]
    params = SimpleNamespace(dsa_top_k=None)
    sequence = SimpleNamespace(
        index=0,
        num_tokens=0,
        length=0,
        counters=SimpleNamespace(),
        request=SimpleNamespace(params=params),
    )
    found.begin(sequence, 0)  # type: ignore[arg-type]
    return found, told, sequence


def step_ahead(sequence: Any, *, emitted: int = 0, depth: int = 0) -> StepAhead:
    """Return a step of one sequence, after steps that may emit this many tokens."""
    return StepAhead({0: sequence}, DraftShape(1, depth, depth) if depth else None, emitted)


@pytest.mark.parametrize(("emitted", "depth"), [(0, 2), (1, 1), (2, 0)])
def test_a_step_is_sparse_if_its_deepest_node_may_reach_the_threshold(
    emitted: int, depth: int
) -> None:
    found, told, sequence = selections(check_interval=0)
    sequence.num_tokens = 1 + 97
    ahead = step_ahead(sequence, emitted=emitted, depth=depth)
    assert not found.request_step(ahead).sparse
    # A general program may run it: it is told in any case, and rows see to the threshold.
    assert told == {LIST_BUDGET: [16]}
    sequence.num_tokens += 1
    assert found.request_step(ahead).sparse
    assert told == {LIST_BUDGET: [16]}


def test_lists_that_a_checks_first_pass_broke_count() -> None:
    found, _, sequence = selections()
    sequence.num_tokens, sequence.length = 201, 200
    mode_request = found.request_step(step_ahead(sequence))
    assert mode_request.checks
    found.received(
        sequence, mode_request, StepResult([1], [0], [], [], [3], checks=[[1, 1, 0, 0, 2]]), 0
    )
    stats = sequence.counters.dsa.stats()
    assert (stats.broken_launches, stats.broken_lists) == (2, 5)


def test_only_a_checked_sequence_counts_a_check() -> None:
    found, _, sequence = selections()
    sequence.length = 200
    mode_request = StepSelections(sparse=True, checks=True, attends={0: "sparse"})
    found.received(
        sequence, mode_request, StepResult([1], [0], [], [], [0], checks=[[1, 0, 0, 0, 0]]), 0
    )
    assert sequence.counters.dsa.stats().checked_steps == 0


def test_modes_count_all_tokens_that_steps_in_flight_may_emit() -> None:
    stepper: Any = object.__new__(DeviceStepper)
    sequence = SimpleNamespace(index=0)
    stepper._rows = SimpleNamespace(sequences=[sequence])
    flights = [StepAhead({0: sequence}, shape, 0) for shape in (DraftShape(1, 3, 3), None)]  # type: ignore[dict-item]
    stepper._flights = [
        StepInFlight(
            number=i,
            ahead=ahead,
            chosen=None,
            step_context=None,
            extends=False,
            is_warm=True,
            mode_requests=(),
            pending=0,
        )
        for i, ahead in enumerate(flights)
    ]  # type: ignore[arg-type]
    ahead = stepper._ahead([sequence], DraftShape(2, 2, 4))
    assert (ahead.most_emitted, ahead.depth) == (5, 2)


@pytest.mark.parametrize(
    ("warm", "checks", "timed"), [(True, False, True), (False, False, False), (True, True, False)]
)
def test_only_warm_steps_of_one_pass_are_timed(warm: bool, checks: bool, timed: bool) -> None:
    timer, now_s = StepTimer(), perf_counter()
    timer._received_s = now_s - 1
    mode_requests, ahead = (StepSelections(checks=checks),), SimpleNamespace(proposal_lengths=None)
    flight = SimpleNamespace(
        is_warm=warm, mode_requests=mode_requests, ahead=ahead, device_was_idle=False
    )
    assert (timer.step_time(flight, now_s - 1) is not None) == timed
