"""The interfaces of executors for decoding: roles to run, or complete steps on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from specbuild.runtime.cache.state_snapshots import StateCopies
from specbuild.runtime.engine_dir.manifest import Limits, StateGroup
from specbuild.runtime.engine_dir.plan import Plan, Port, ProgramEntry


@dataclass(frozen=True)
class ExecutorCapabilities:
    """The capabilities of an executor, as data.

    ``batch_invariant``: the bits of a row's result do not depend on the rest of its launch.
    ``invariant_rows``: this holds among launches of up to this number of rows; None: among all.
    ``device_step``: it runs a complete speculative step without the host. ``fixed_pages``:
    sequences keep their pages and tables, and views of them begin at position 0, so that a row's
    sums are divided in the same way whatever precedes it in the launch.
    """

    name: str
    batch_invariant: bool
    device_step: bool
    fixed_pages: bool = False
    invariant_rows: int | None = None


class Executor(Protocol):
    """Runs an engine's graphs by role. It owns the KV pools and updates them in place."""

    @property
    def capabilities(self) -> ExecutorCapabilities:
        """The capabilities of this executor."""
        ...

    def close(self) -> None:
        """Release the graphs and pools; the executor cannot be used afterwards."""
        ...

    def prepare(self, roles: Sequence[str]) -> None:
        """Load what these roles need, so that their first run is as fast as later ones."""
        ...

    def run(self, role: str, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the outputs of one role by name. ``feeds`` has every input except the pools.

        The returned arrays are valid until the role's next run, and may be fed to it.
        """
        ...


@runtime_checkable
class SavesStates(Protocol):
    """An executor whose recurrent states can be copied to host memory."""

    def state_copies(self, group: StateGroup, limits: Limits, *, capacity: int) -> StateCopies:
        """Allocate memory for ``capacity`` copies of a slot of this group of an engine.

        Raises UnsupportedHereError where the host has less memory.
        """
        ...


@dataclass(frozen=True)
class StepResult:
    """The results of one step for each of its B sequences.

    The first ``count[b]`` entries of ``tokens[b]`` and ``logprobs[b]`` were emitted;
    ``accepted[b]`` draft tokens were accepted, emitted or not. In a sparse step (DSA) ``broken[b]``
    lists broke an invariant, and in a check ``checks[b]`` are the five numbers of ``ring.checks``.
    In a step with capacity to re-verify (SpecPV), the target sampled again at ``rechecked[b]``
    re-verified tokens, ``agreed[b]`` times with the same result.
    """

    count: list[int]
    accepted: list[int]
    tokens: list[list[int]]
    logprobs: list[list[float]]
    broken: list[int] = field(default_factory=list)
    rechecked: list[int] = field(default_factory=list)
    agreed: list[int] = field(default_factory=list)
    checks: list[list[int]] = field(default_factory=list)


@runtime_checkable
class DeviceExecutor(Protocol):
    """Runs an engine's programs, whose state stays on the device.

    The host accesses the state by the plan's ports (see ``Port``). Programs, writes, fills and
    copies run in call order, and the calls do not wait for them.
    """

    @property
    def capabilities(self) -> ExecutorCapabilities:
        """The capabilities of this executor."""
        ...

    @property
    def plan(self) -> Plan:
        """The programs and ports."""
        ...

    def use(self) -> None:
        """Let the calling thread use the executor."""
        ...

    def port(self, name: str) -> Port | None:
        """Return a port, or None if the plan has none of this name."""
        ...

    def write(self, name: str, values: np.ndarray, *, row: int = 0) -> None:
        """Write values to a port from a row on; they may change after the call."""
        ...

    def fill(self, name: str, value: float, *, row: int = 0, rows: int = 1) -> None:
        """Set every element of some rows."""
        ...

    def copy(self, source: str, row: int, target: str, target_row: int) -> None:
        """Copy a row of a port to one of another port, up to the length of the shorter row."""
        ...

    def read(self, name: str, *, rows: int | None = None) -> np.ndarray:
        """Return a port's values, or its first ``rows`` rows, after all queued work."""
        ...

    def fetch(self, name: str) -> Callable[[], np.ndarray]:
        """Queue a read of a port; the returned function waits for that and for no later work.

        It is for a few small ports: each launch in flight has up to four.
        """
        ...

    def prepare(self, entry: ProgramEntry) -> None:
        """Do everything that the first run of a program would do, except run it."""
        ...

    def start(self, entry: ProgramEntry, step: int | None = None) -> None:
        """Queue a program; ``step`` is the number for :meth:`wait_step`."""
        ...

    def wait_step(self, number: int, batch: int) -> StepResult:
        """Wait for the step with this number and return its results."""
        ...

    def synchronize(self) -> None:
        """Wait for all queued work."""
        ...

    def close(self) -> None:
        """Release everything; the executor must not be used afterwards."""
        ...


@dataclass(frozen=True)
class OpenedEngine:
    """An executor, and the conditions of times that are measured with it.

    ``processor`` is the CPU or GPU, ``settings`` the other conditions: threads, versions.
    """

    executor: Executor | DeviceExecutor
    processor: str
    settings: tuple[object, ...] = ()
