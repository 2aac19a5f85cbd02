"""Fills of rows that wait for the next launch, against fills that are made at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from left_out import examples

from specbuild.runtime.decode.device.deferred_fills import DeferredFills

ROWS = 4
NAMES = ["length", "done", "changes", "forced"]


class Ports:
    """An executor's ports in memory, and what a launch found in them."""

    def __init__(self) -> None:
        self.values = {name: np.zeros(ROWS, np.int32) for name in NAMES}
        self.calls: list[str] = []
        self.launches: list[dict[str, list[int]]] = []

    def fill(self, name: str, value: float, *, row: int = 0, rows: int = 1) -> None:
        self.calls.append(f"fill {name}")
        self.values[name][row : row + rows] = value

    def write(self, name: str, values: np.ndarray, *, row: int = 0) -> None:
        self.calls.append(f"write {name}")
        self.values[name][row : row + len(values)] = values

    def copy(self, source: str, row: int, target: str, target_row: int) -> None:
        self.calls.append(f"copy {target}")
        self.values[target][target_row] = self.values[source][row]

    def fetch(self, name: str) -> Callable[[], np.ndarray]:
        values = self.values[name].copy()
        return lambda: values

    def read(self, name: str, *, rows: int | None = None) -> np.ndarray:
        return self.values[name][:rows].copy()

    def start(self, entry: Any, step: int | None = None) -> None:  # noqa: ARG002
        """Record all values, then advance those that a step changes."""
        self.launches.append({name: values.tolist() for name, values in self.values.items()})
        self.values["length"] += 1
        self.values["done"][::2] ^= 1


rows = st.integers(0, ROWS - 1)
actions = st.one_of(
    st.tuples(st.just("fill"), st.sampled_from(NAMES), st.integers(0, 2), rows, st.integers(1, 2)),
    st.tuples(st.just("write"), st.sampled_from(NAMES), st.integers(0, 2), rows),
    st.tuples(st.just("copy"), st.sampled_from(NAMES), rows, rows),
    st.tuples(st.sampled_from(["fetch", "read"]), st.sampled_from(NAMES)),
    st.just(("start",)),
)


def apply(executor: Any, action: tuple[Any, ...]) -> Any:
    match action:
        case ("fill", name, value, row, count):
            executor.fill(name, value, row=row, rows=min(count, ROWS - row))
        case ("write", name, value, row):
            executor.write(name, np.array([value], np.int32), row=row)
        case ("copy", name, row, target_row):
            executor.copy(name, row, name, target_row)
        case ("fetch", name):
            return executor.fetch(name)().tolist()
        case ("read", name):
            return executor.read(name).tolist()
        case _:
            executor.start(None)
    return None


@examples(200)
@given(st.lists(actions, max_size=40))
def test_launches_and_reads_find_the_values_of_fills_at_once(chosen: list[Any]) -> None:
    direct, ports = Ports(), Ports()
    deferred = DeferredFills(ports)  # type: ignore[arg-type]
    for action in [*chosen, ("start",)]:
        assert apply(deferred, action) == apply(direct, action)
    assert ports.launches == direct.launches
    assert len([c for c in ports.calls if c.startswith(("fill", "write"))]) <= len(direct.calls) + 1


def test_values_that_a_launch_does_not_see_cost_no_call() -> None:
    """A row that is excluded and included again, and changes of adjacent rows."""
    ports = Ports()
    deferred = DeferredFills(ports)  # type: ignore[arg-type]
    deferred.fill("done", 1, row=2)
    deferred.fill("done", 0, row=2)
    for row in range(ROWS):
        deferred.fill("length", 7, row=row)
    deferred.start(None)  # type: ignore[arg-type]
    assert ports.calls == ["fill done", "fill length"]
    assert ports.launches[0]["length"] == [7] * ROWS


def test_values_of_the_host_are_written_once() -> None:
    """No program changes these ports, so equal values are not written again."""
    ports = Ports()
    deferred = DeferredFills(ports)  # type: ignore[arg-type]
    for values in ([2, 4, 0, 4], [2, 4, 0, 4], [2, 0, 0, 0]):
        for row, value in enumerate(values):
            deferred.fill("changes", value, row=row)
        deferred.start(None)  # type: ignore[arg-type]
        assert ports.launches[-1]["changes"] == values
    assert ports.calls == ["write changes", "write changes"]
