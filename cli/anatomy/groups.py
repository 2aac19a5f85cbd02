"""Groups the launches of a step: similar layers form one group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from specbuild.runtime.measure.anatomy import LaunchAnatomy, StepAnatomy

# The number of layers that are listed individually; more are "0, 2, … 22".
_NAMED = 4


@dataclass(frozen=True)
class GroupRow:
    """One launch of a layer, with means over all layers of the group.

    ``waits_for`` is the last launch whose results it reads, in most layers: ``front``, ``3
    before``, or ``–`` if no launch of the step wrote them.
    """

    launch: LaunchAnatomy
    bytes_read: float
    added_s: float | None
    serial_s: float | None
    waits_for: str


@dataclass(frozen=True)
class LaunchGroup:
    """``copies`` similar sequences of launches, such as layers; ``rows`` describes one."""

    title: str
    copies: int
    rows: tuple[GroupRow, ...]

    @property
    def is_layers(self) -> bool:
        """Whether each copy is a layer."""
        return self.rows[0].launch.layer is not None

    @property
    def bytes_read(self) -> float:
        """The bytes that all copies read."""
        return self.copies * sum(row.bytes_read for row in self.rows)

    @property
    def added_s(self) -> float | None:
        """The time that all copies add."""
        return self._total(lambda row: row.added_s)

    @property
    def serial_s(self) -> float | None:
        """The serial time of all copies."""
        return self._total(lambda row: row.serial_s)

    def _total(self, of: Callable[[GroupRow], float | None]) -> float | None:
        times = [of(row) for row in self.rows]
        measured = [time for time in times if time is not None]
        return self.copies * sum(measured) if len(measured) == len(times) else None


def folded(step: StepAnatomy) -> list[LaunchGroup]:
    """Return the groups in the order of their first launches; together they have all launches."""
    runs: dict[object, list[list[int]]] = {}
    places = range(len(step.launches))
    for (_, layer), run in groupby(places, key=lambda i: _owner(step.launches[i])):
        indices = list(run)
        key = (layer is None, *(_likeness(step.launches[i]) for i in indices))
        runs.setdefault(key, []).append(indices)
    layered = {launch.section for launch in step.launches if launch.layer is not None}
    return [_group(step, copies, layered) for copies in runs.values()]


def _owner(launch: LaunchAnatomy) -> tuple[str, int | None]:
    return launch.section, launch.layer


def _likeness(launch: LaunchAnatomy) -> tuple[object, ...]:
    cut = (launch.grid, launch.block, launch.shared_bytes)
    return launch.op, launch.kernel, *cut, round(launch.bytes_read), launch.starts_early


def _group(
    step: StepAnatomy, copies: Sequence[Sequence[int]], layered: Collection[str]
) -> LaunchGroup:
    firsts = [step.launches[indices[0]] for indices in copies]
    places = zip(*copies, strict=True)
    return LaunchGroup(
        _title(firsts, layered), len(copies), tuple(_row(step, launches) for launches in places)
    )


def _row(step: StepAnatomy, places: Sequence[int]) -> GroupRow:
    launches = [step.launches[place] for place in places]
    waits = Counter(map(_waits_for, launches, places))
    return GroupRow(
        launch=launches[0],
        bytes_read=sum(launch.bytes_read for launch in launches) / len(launches),
        added_s=_mean(launch.added_s for launch in launches),
        serial_s=_mean(launch.serial_s for launch in launches),
        waits_for=waits.most_common(1)[0][0],
    )


def _waits_for(launch: LaunchAnatomy, place: int) -> str:
    if not launch.needs:
        return "–"
    before = place - max(launch.needs)
    return "front" if before == 1 else f"{before} before"


def _mean(times: Iterable[float | None]) -> float | None:
    all_times = list(times)
    measured = [time for time in all_times if time is not None]
    return sum(measured) / len(measured) if measured and len(measured) == len(all_times) else None


def _title(firsts: Sequence[LaunchAnatomy], layered: Collection[str]) -> str:
    sections = ", ".join(dict.fromkeys(launch.section for launch in firsts))
    layers = [launch.layer for launch in firsts if launch.layer is not None]
    if layers:
        noun = "layer" if len(layers) == 1 else "layers"
        return f"{sections}: {len(layers)} {noun}, {_numbers(layers)}"
    suffix = ", outside of layers" if firsts[0].section in layered else ""
    return f"{sections}{suffix}" + (f", {len(firsts)} times" if firsts[1:] else "")


def _numbers(layers: Sequence[int]) -> str:
    if len(layers) <= _NAMED:
        return ", ".join(map(str, layers))
    return f"{layers[0]}, {layers[1]}, … {layers[-1]}"
