"""Tables of a step's anatomy: one for each kind of layer, 80 columns wide."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group
from rich.table import Table

from specbuild.cli.anatomy.groups import GroupRow, LaunchGroup, folded
from specbuild.runtime.measure.anatomy import StepAnatomy

_NONE = "–"
_MEASURED = (("kernel", 22), ("CTAs", 5), ("µs", 7), ("serial", 7), ("MB", 8), ("of read", 7))
_PLANNED = (("kernel", 26), ("CTAs", 6), ("threads", 7), ("MB", 8), ("least µs", 8))
_WAITING = (("starts", 6), ("waits for", 9))
_LEFT = ("kernel", "starts", "waits for")


def anatomy_tables(step: StepAnatomy) -> Group:
    """Return the step's title, the groups of its launches, and the sum of their times."""
    return Group(_heading(step), *(_table(step, group) for group in folded(step)), *_sums(step))


def step_title(step: StepAnatomy) -> str:
    """``step@1 (no draft), batch 1, context 1002``."""
    return f"{step.program} ({step.draft}), batch {step.batch}, context {step.context:.0f}"


def _heading(step: StepAnatomy) -> str:
    parts = [f"{len(step.launches)} launches", f"{step.bytes_read / 1e6:.1f} MB"]
    if step.experts:
        kind = "" if step.experts_measured else "~"
        parts.append(f"{kind}{step.experts:.1f} experts a layer")
    if step.bytes_per_s is not None:
        floor_s = step.bytes_read / step.bytes_per_s
        parts.append(f"{1e6 * floor_s:.1f} µs at {step.bytes_per_s / 1e12:.2f} TB/s")
    return f"\n{step_title(step)}\n  {', '.join(parts)}"


def _table(step: StepAnatomy, group: LaunchGroup) -> Table:
    measured = step.step_s is not None
    table = Table(title=group.title, title_justify="left", box=None, padding=(0, 1, 0, 0),
                  pad_edge=False)  # fmt: skip
    for name, width in (*(_MEASURED if measured else _PLANNED), *_WAITING):
        justify = "left" if name in _LEFT else "right"
        table.add_column(name, width=width, overflow="fold", justify=justify)  # type: ignore[arg-type]
    for row in group.rows:
        cells = _measured(step, row) if measured else _planned(step, row)
        starts = "early" if row.launch.starts_early else "after"
        table.add_row(*cells, starts, row.waits_for)
    table.add_row(*_total(step, group))
    return table


def _measured(step: StepAnatomy, row: GroupRow) -> tuple[str, ...]:
    return (
        _entry(row),
        str(_ctas(row)),
        *map(_micro, (row.added_s, row.serial_s)),
        _mega(row.bytes_read),
        _share(step, row.bytes_read, row.added_s),
    )


def _planned(step: StepAnatomy, row: GroupRow) -> tuple[str, ...]:
    cut = (str(_ctas(row)), str(row.launch.block))
    return (_entry(row), *cut, _mega(row.bytes_read), _micro(_floor_s(step, row.bytes_read)))


def _total(step: StepAnatomy, group: LaunchGroup) -> tuple[str, ...]:
    name = "together" if group.copies == 1 else f"all {group.copies} together"
    read = _mega(group.bytes_read)
    if step.step_s is None:
        return name, "", "", read, _micro(_floor_s(step, group.bytes_read))
    times = map(_micro, (group.added_s, group.serial_s))
    return name, "", *times, read, _share(step, group.bytes_read, group.added_s)


def _sums(step: StepAnatomy) -> Iterator[str]:
    if step.step_s is None:
        return
    share = _share(step, step.bytes_read, step.step_s)
    yield f"\nas one graph: {1e6 * step.step_s:.1f} µs, {share} of the streaming read"
    added_s = sum(launch.added_s or 0.0 for launch in step.launches)
    yield f"its launches add up to {1e6 * added_s:.1f} µs: {100 * added_s / step.step_s:.1f} %"
    if step.serial_s is None:
        return
    serial_s = sum(launch.serial_s or 0.0 for launch in step.launches)
    yield (
        f"none beside another (serial): {1e6 * step.serial_s:.1f} µs, add up to "
        f"{1e6 * serial_s:.1f} µs"
    )


def _entry(row: GroupRow) -> str:
    return row.launch.kernel.rpartition(":")[2]


def _ctas(row: GroupRow) -> int:
    x, y, z = row.launch.grid
    return x * y * z


def _floor_s(step: StepAnatomy, bytes_read: float) -> float | None:
    return None if step.bytes_per_s is None else bytes_read / step.bytes_per_s


def _micro(time_s: float | None) -> str:
    return _NONE if time_s is None else f"{1e6 * time_s:.2f}"


def _mega(amount: float) -> str:
    return f"{amount / 1e6:.2f}"


def _share(step: StepAnatomy, bytes_read: float, time_s: float | None) -> str:
    floor_s = _floor_s(step, bytes_read)
    if floor_s is None or not bytes_read or time_s is None or time_s <= 0:
        return _NONE
    return f"{100 * floor_s / time_s:.0f} %"
