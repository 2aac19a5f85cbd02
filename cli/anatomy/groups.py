"""Launches of a step, folded: layers that are alike stand in one group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from specbuild.runtime.measure.anatomy import LaunchAnatomy, StepAnatomy

# Layers that are named one by one; more are "0, 2, … 22".
_NAMED = 4


@dataclass(frozen=True)
class GroupRow:
    """One launch of a layer, in all layers of the group: means over them.

    ``waits_for``: the last launch whose results it reads, in most layers: ``front``, ``3 before``,
    or ``–`` where no launch of the step wrote them.
    """

    launch: LaunchAnatomy
    bytes_read: float
    added_s: float | None
    serial_s: float | None
    waits_for: str


@dataclass(frozen=True)
class LaunchGroup:
    """Runs of launches that are alike, ``copies`` of them, such as layers; ``rows`` of one."""

    title: str
    copies: int
    rows: tuple[GroupRow, ...]

    @property
    def is_layers(self) -> bool:
        """Whether each copy is a layer."""
        return self.rows[0].launch.layer is not None

    @property
    def bytes_read(self) -> float:
        """Of all copies."""
        return self.copies * sum(row.bytes_read for row in self.rows)

    @property
    def added_s(self) -> float | None:
        """Of all copies."""
        return self._whole(lambda row: row.added_s)

    @property
    def serial_s(self) -> float | None:
        """Of all copies."""
        return self._whole(lambda row: row.serial_s)

    def _whole(self, of: Callable[[GroupRow], float | None]) -> float | None:
        times = [of(row) for row in self.rows]
        known = [time for time in times if time is not None]
        return self.copies * sum(known) if len(known) == len(times) else None


def folded(step: StepAnatomy) -> list[LaunchGroup]:
    """The groups, in the order in which their first launches run; together all launches."""
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
        _title(firsts, layered), len(copies), tuple(_row(step, alike) for alike in places)
    )


def _row(step: StepAnatomy, places: Sequence[int]) -> GroupRow:
    alike = [step.launches[place] for place in places]
    waits = Counter(map(_waits_for, alike, places))
    return GroupRow(
        launch=alike[0],
        bytes_read=sum(launch.bytes_read for launch in alike) / len(alike),
        added_s=_mean(launch.added_s for launch in alike),
        serial_s=_mean(launch.serial_s for launch in alike),
        waits_for=waits.most_common(1)[0][0],
    )


def _waits_for(launch: LaunchAnatomy, place: int) -> str:
    if not launch.needs:
        return "–"
    before = place - max(launch.needs)
    return "front" if before == 1 else f"{before} before"


def _mean(times: Iterable[float | None]) -> float | None:
    found = list(times)
    known = [time for time in found if time is not None]
    return sum(known) / len(known) if known and len(known) == len(found) else None


def _title(firsts: Sequence[LaunchAnatomy], layered: Collection[str]) -> str:
    sections = ", ".join(dict.fromkeys(launch.section for launch in firsts))
    layers = [launch.layer for launch in firsts if launch.layer is not None]
    if layers:
        noun = "layer" if len(layers) == 1 else "layers"
        return f"{sections}: {len(layers)} {noun}, {_numbers(layers)}"
    beside = ", outside of layers" if firsts[0].section in layered else ""
    return f"{sections}{beside}" + (f", {len(firsts)} times" if firsts[1:] else "")


def _numbers(layers: Sequence[int]) -> str:
    if len(layers) <= _NAMED:
        return ", ".join(map(str, layers))
    return f"{layers[0]}, {layers[1]}, … {layers[-1]}"
