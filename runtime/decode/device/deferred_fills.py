"""Collects the fills of single rows between two launches.

A call of the driver takes the host several microseconds, and the device as well. A guided sequence
changes scalars of its row several times between two steps. Only their last values matter to the
next launch, and those of adjacent rows can share a call.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specbuild.runtime.decode.device.processor_rows import CHANGES
from specbuild.runtime.engine_dir.plan import FORCED, Plan, Port, ProgramEntry
from specbuild.runtime.executors.executor import DeviceExecutor, ExecutorCapabilities, StepResult

# Ports that no program changes: their values on the device are those that were last written.
_HOST_PORTS = frozenset({CHANGES, FORCED})


class DeferredFills:
    """An executor that queues the fills of rows before the next call that may read them.

    A later value of a row replaces an earlier one.
    """

    def __init__(self, executor: DeviceExecutor) -> None:
        self._executor = executor
        # Values to fill, by port and row.
        self._values: dict[str, dict[int, float]] = {}
        # Values on the device, of the ports that only the host changes.
        self._written: dict[str, dict[int, float]] = {name: {} for name in _HOST_PORTS}

    @property
    def capabilities(self) -> ExecutorCapabilities:
        """The capabilities of the executor."""
        return self._executor.capabilities

    @property
    def plan(self) -> Plan:
        """The programs and ports."""
        return self._executor.plan

    def use(self) -> None:
        """Let the calling thread use the executor."""
        self._executor.use()

    def port(self, name: str) -> Port | None:
        """Return a port, or None if the plan has none of this name."""
        return self._executor.port(name)

    def fill(self, name: str, value: float, *, row: int = 0, rows: int = 1) -> None:
        """Set every element of some rows before the next launch."""
        values = self._values.get(name)
        if values is None:
            values = self._values[name] = {}
        for each in range(row, row + rows):
            values[each] = value

    def write(self, name: str, values: np.ndarray, *, row: int = 0) -> None:
        """Write values to a port from a row on, after the fills of this port."""
        self._flush_port(name)
        if name in self._written:
            self._written[name].clear()
        self._executor.write(name, values, row=row)

    def copy(self, source: str, row: int, target: str, target_row: int) -> None:
        """Copy a row of a port to one of another port, after the fills of both."""
        self._flush_port(source)
        self._flush_port(target)
        if target in self._written:
            self._written[target].pop(target_row, None)
        self._executor.copy(source, row, target, target_row)

    def read(self, name: str, *, rows: int | None = None) -> np.ndarray:
        """Return a port's values after all queued work."""
        self.flush()
        return self._executor.read(name, rows=rows)

    def fetch(self, name: str) -> Callable[[], np.ndarray]:
        """Queue a read of a port."""
        self._flush_port(name)
        return self._executor.fetch(name)

    def prepare(self, entry: ProgramEntry) -> None:
        """Do everything that the first run of a program would do, except run it."""
        self._executor.prepare(entry)

    def start(self, entry: ProgramEntry, step: int | None = None) -> None:
        """Queue the fills, then a program."""
        self.flush()
        self._executor.start(entry, step)

    def wait_step(self, number: int, batch: int) -> StepResult:
        """Wait for a step and return its results."""
        return self._executor.wait_step(number, batch)

    def synchronize(self) -> None:
        """Wait for all queued work."""
        self._executor.synchronize()

    def close(self) -> None:
        """Release everything."""
        self._executor.close()

    def flush(self) -> None:
        """Queue all fills."""
        for name in list(self._values):
            self._flush_port(name)

    def _flush_port(self, name: str) -> None:
        values = self._values.pop(name, None)
        if values is None:
            return
        written = self._written.get(name)
        if written is not None:
            values = {row: v for row, v in values.items() if written.get(row) != v}
            written |= values
        runs = _runs(values)
        if written is not None and len(runs) > 1:
            first, last = runs[0][0], max(values)
            span = [written.get(row) for row in range(first, last + 1)]
            if None not in span:
                self._executor.write(name, np.array(span, np.int32), row=first)
                return
        for first, count, value in runs:
            self._executor.fill(name, value, row=first, rows=count)


def _runs(values: dict[int, float]) -> list[tuple[int, int, float]]:
    """Return the first row, the number of rows and the value of adjacent rows with equal values."""
    runs: list[tuple[int, int, float]] = []
    for row in sorted(values):
        if runs and runs[-1][0] + runs[-1][1] == row and runs[-1][2] == values[row]:
            first, count, value = runs[-1]
            runs[-1] = (first, count + 1, value)
        else:
            runs.append((row, 1, values[row]))
    return runs
