"""What a decoding loop asks of a backend: roles to run, or whole steps on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from specbuild.runtime.engine_dir.plan import Plan, Port, ProgramEntry


@dataclass(frozen=True)
class ExecutorCapabilities:
    """What an executor can do, as data.

    ``batch_invariant``: a row's result does not depend, bit for bit, on what shares its launch.
    ``invariant_rows``: that holds among launches of up to so many rows; None: among all.
    ``device_step``: runs a whole speculative step without the host.
    ``fixed_pages``: sequences keep their pages and tables while they live, and views of them begin
    at position 0, so that a row's sums are cut alike whatever stands before it in the launch.
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
        """What this executor can do."""
        ...

    def close(self) -> None:
        """Release the graphs and pools; the executor cannot be used after this."""
        ...

    def prepare(self, roles: Sequence[str]) -> None:
        """Loads what these roles need, so that their first run is as fast as any."""
        ...

    def run(self, role: str, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs of one role by name. ``feeds`` holds every input but the pools.

        The arrays returned stay valid until the same role runs again, and may be fed to it.
        """
        ...


@runtime_checkable
class HostStates(Protocol):
    """An executor whose recurrent states the host can copy."""

    def state_pools(self, group: str) -> Mapping[str, np.ndarray]:
        """The pools of a state group by name, each [slots, …], as views of their memory."""
        ...


@dataclass(frozen=True)
class StepResult:
    """What one step gave for each of its B sequences.

    The first ``count[b]`` entries of ``tokens[b]`` and ``logprobs[b]`` were emitted;
    ``accepted[b]`` drafts were confirmed, emitted or not. ``broken[b]`` of its lists broke an
    invariant, where the step was sparse (DSA); ``checks[b]`` are the five numbers of
    ``ring.checks``, where it was checked. At ``rechecked[b]`` re-verified tokens the target sampled
    once more, and ``agreed[b]`` times the same, where the step had capacity for them (SpecPV).
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

    The host reads and writes the state by the plan's ports (``Port`` lists them). Programs,
    writes, fills and copies happen in the order of the calls, which do not wait for them.
    """

    @property
    def capabilities(self) -> ExecutorCapabilities:
        """What this executor can do."""
        ...

    @property
    def plan(self) -> Plan:
        """The programs and ports."""
        ...

    def use(self) -> None:
        """Lets the calling thread use the executor."""
        ...

    def port(self, name: str) -> Port | None:
        """A port, None where the plan has none of this name."""
        ...

    def write(self, name: str, values: np.ndarray, *, row: int = 0) -> None:
        """Puts values into a port from a row on; they may change when this returns."""
        ...

    def fill(self, name: str, value: float, *, row: int = 0, rows: int = 1) -> None:
        """Sets every element of some rows."""
        ...

    def copy(self, source: str, row: int, target: str, target_row: int) -> None:
        """Copies a row of a port to one of another: as much as the smaller row has."""
        ...

    def read(self, name: str, *, rows: int | None = None) -> np.ndarray:
        """A port's values once all that is queued is done; its first ``rows`` rows."""
        ...

    def fetch(self, name: str) -> Callable[[], np.ndarray]:
        """Queues the reading of a port; what it returns waits for that, and for nothing behind.

        For a few small ports at a time: launches in flight have up to four each.
        """
        ...

    def prepare(self, entry: ProgramEntry) -> None:
        """Does all that a program's first run would do beside running."""
        ...

    def start(self, entry: ProgramEntry, step: int | None = None) -> None:
        """Queues a program; ``step`` is the number by which it is waited for."""
        ...

    def wait_step(self, number: int, batch: int) -> StepResult:
        """What the step with this number gave, once it is through."""
        ...

    def synchronize(self) -> None:
        """Waits for all that is queued."""
        ...

    def close(self) -> None:
        """Gives everything back; nothing of the executor may be used after."""
        ...


@dataclass(frozen=True)
class OpenedEngine:
    """An executor, and what the times hold for that are measured with it.

    ``processor`` is the CPU or GPU, ``settings`` what else changes them: threads, versions.
    """

    executor: Executor | DeviceExecutor
    processor: str
    settings: tuple[object, ...] = ()
