"""The anatomy of steps as a picture: launches over time, for complete steps and single layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specbuild.builder.svg import GREY, save_svg
from specbuild.cli.anatomy.groups import GroupRow, LaunchGroup, folded
from specbuild.cli.anatomy.tables import step_title
from specbuild.runtime.measure.anatomy import StepAnatomy

_WIDTH, _STRIP, _LAYER, _LEGEND = 11.0, 0.9, 1.5, 1.0
_FLOOR = GREY
# The minimum width of a bar with its time, as a share of a layer's width.
_NAMED = 0.045


def plot_anatomies(steps: Sequence[StepAnatomy], file: Path, *, engine: str) -> None:
    """Write an SVG; the same steps give the same bytes.

    For each step it shows every launch in order, with the width of its added time. Then it shows
    one layer of each kind: the added time of its launches, their serial time, and the time for
    their bytes. Hatched launches start after the previous one ends. The id of a bar is
    ``step-S-launch-L``, or ``step-S-group-G-row-R``.
    """
    from matplotlib.figure import Figure

    drawn = [(step, [group for group in folded(step) if group.is_layers]) for step in steps]
    heights = [h for _, groups in drawn for h in (_STRIP, *[_LAYER] * len(groups))]
    heights.append(_LEGEND)
    figure = Figure(figsize=(_WIDTH, sum(heights) + 0.4), layout="constrained")
    figure.suptitle(engine)
    strips = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    free = iter(strips)
    colours = _colours(steps)
    for number, (step, groups) in enumerate(drawn):
        _draw_step(next(free), step, colours, f"step-{number}")
        for place, group in enumerate(groups):
            _layer(next(free), step, group, colours, f"step-{number}-group-{place}")
    _legend(next(free), colours)
    save_svg(figure, file)


def _colours(steps: Sequence[StepAnatomy]) -> dict[str, Any]:
    """Return a colour for each kernel in all steps; colours repeat after twenty kernels."""
    import matplotlib as mpl

    launches = [launch for step in steps for launch in step.launches]
    names = list(dict.fromkeys(_entry(launch.kernel) for launch in launches))
    palette = mpl.colormaps["tab20"]
    return {name: palette(place % palette.N) for place, name in enumerate(names)}


def _entry(kernel: str) -> str:
    return kernel.rpartition(":")[2]


def _draw_step(axes: Any, step: StepAnatomy, colours: dict[str, Any], name: str) -> None:
    at = 0.0
    for place, launch in enumerate(step.launches):
        wide = 1e6 * max(launch.added_s or 0.0, 0.0)
        [bar] = axes.barh(0, wide, left=at, color=colours[_entry(launch.kernel)])
        bar.set_gid(f"{name}-launch-{place}")
        at += wide
    axes.set_yticks([])
    axes.set_xlim(0, at or 1.0)
    time_text = "" if step.step_s is None else f": {1e6 * step.step_s:.1f} µs as its graph"
    axes.set_title(f"{step_title(step)}{time_text}", loc="left", fontsize=9)
    axes.set_xlabel("µs", fontsize=8)


def _layer(
    axes: Any, step: StepAnatomy, group: LaunchGroup, colours: dict[str, Any], name: str
) -> None:
    ends = [_bars(axes, group, colours, name, lane) for lane in (2, 1)]
    if step.bytes_per_s is not None:
        ends.append(_floors(axes, step, group))
    wide = max(ends) or 1.0
    _names(axes, group, wide)
    axes.set_yticks([2, 1, 0], ["adds", "serial", "read"], fontsize=8)
    axes.set_xlim(0, wide)
    axes.set_title(f"{group.title}: the mean of {group.copies}", loc="left", fontsize=9)


def _bars(axes: Any, group: LaunchGroup, colours: dict[str, Any], name: str, lane: int) -> float:
    at = 0.0
    for place, row in enumerate(group.rows):
        wide = _micro(row, lane)
        colour = colours[_entry(row.launch.kernel)]
        hatch = None if row.launch.starts_early else "//"
        [bar] = axes.barh(lane, wide, left=at, color=colour, hatch=hatch, edgecolor="white",
                          linewidth=0.5)  # fmt: skip
        bar.set_gid(f"{name}-row-{place}{'' if lane == 2 else '-serial'}")
        at += wide
    return at


def _micro(row: GroupRow, lane: int) -> float:
    return 1e6 * max((row.added_s if lane == 2 else row.serial_s) or 0.0, 0.0)


def _floors(axes: Any, step: StepAnatomy, group: LaunchGroup) -> float:
    """Draw the times of a layer's launches, and below them the time of a streaming read."""
    at = end = 0.0
    for row in group.rows:
        wide = 1e6 * row.bytes_read / (step.bytes_per_s or 1.0)
        axes.barh(0, wide, left=at, color=_FLOOR, height=0.5)
        end = max(end, at + wide)
        at += _micro(row, 2)
    return end


def _names(axes: Any, group: LaunchGroup, wide: float) -> None:
    at = 0.0
    for row in group.rows:
        time_us = _micro(row, 2)
        if time_us > _NAMED * wide:
            axes.text(at + time_us / 2, 2, f"{time_us:.1f}", ha="center", va="center", fontsize=7)
        at += time_us


def _legend(axes: Any, colours: dict[str, Any]) -> None:
    from matplotlib.patches import Patch

    axes.axis("off")
    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    axes.legend(handles=handles, loc="upper left", ncols=5, fontsize=7, frameon=False)
