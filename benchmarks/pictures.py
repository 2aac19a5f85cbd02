"""Bars and lines as SVG, 600 pixels wide, in colours for white pages and dark ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import log

WIDTH = 600
GREY = "#747c86"
COLOURS = ("#1391a0", "#cf6a1f", "#8a63d2", "#4d9a2a", "#c2407f", "#8c7a10")
_STYLE = f"""<style>
text {{ font-family: sans-serif; font-size: 13px; fill: {GREY} }} .title {{ font-weight: 600 }}
.grid {{ stroke: {GREY}; stroke-opacity: 0.3 }} .axis {{ stroke: {GREY} }}
.peer {{ fill: #8c959f }} .ours {{ fill: {COLOURS[0]} }}
.floor {{ fill: none; stroke: {COLOURS[0]}; stroke-dasharray: 4 3 }}
</style>
"""


@dataclass(frozen=True)
class Bar:
    """A bar: tokens per second, and the rate that the bytes alone would allow."""

    label: str
    tokens_per_s: float
    ours: bool = False
    floor: float | None = None


@dataclass(frozen=True)
class Line:
    """A named line through points, dashed or not."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: str
    dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """The quantity of an axis, its ends, and the places of its numbers."""

    title: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """Return the position of a value along the axis, from 0 to 1."""
        if self.logarithmic:
            return log(value / self.low) / log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def svg(height: float, parts: Sequence[str]) -> str:
    """Return a picture of these parts."""
    size = f'width="{WIDTH}" height="{height:g}" viewBox="0 0 {WIDTH} {height:g}"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{_STYLE}{body}\n</svg>\n'


def bars_height(count: int) -> int:
    """Return the height in pixels of a panel with this number of bars."""
    return 24 * count + 80


def bars(title: str, panel: Sequence[Bar], axis: Axis, top: float) -> Iterator[str]:
    """Return a panel of bars, each with its number, and the axis below."""
    left, width, line = 146, 344, 24
    bottom = top + 14 + line * len(panel)

    def x(value: float) -> float:
        return left + width * axis.share(value)

    yield _text(0, top, title, "title")
    for value, label in axis.ticks:
        yield _rule(x(value), top + 10, x(value), bottom, "grid")
        yield _text(x(value), bottom + 17, label, anchor="middle")
    yield _text(left + width / 2, bottom + 35, axis.title, anchor="middle")
    for number, bar in enumerate(panel):
        y = top + 15 + number * line
        yield _text(left - 8, y + 14, bar.label, anchor="end")
        kind = "ours" if bar.ours else "peer"
        yield _box(left, y, x(bar.tokens_per_s) - left, 18, kind)
        if bar.floor:
            yield _box(left, y + 0.5, x(bar.floor) - left, 17, "floor")
        share = f" ({bar.tokens_per_s / bar.floor:.0%})" if bar.floor else ""
        end = x(bar.floor or bar.tokens_per_s)
        yield _text(end + 6, y + 14, f"{bar.tokens_per_s:.0f}{share}")
    yield _rule(left, top + 10, left, bottom, "axis")


def lines(title: str, drawn: Sequence[Line], across: Axis, up: Axis, top: float) -> Iterator[str]:
    """Return a panel of lines, 250 pixels high, each with its name at its right end."""
    left, width, height = 52, 372, 170
    ceiling = top + 14

    def x(value: float) -> float:
        return left + width * across.share(value)

    def y(value: float) -> float:
        return ceiling + height * (1 - up.share(value))

    yield _text(0, top, title, "title")
    for value, label in up.ticks:
        yield _rule(left, y(value), left + width, y(value), "grid")
        yield _text(left - 8, y(value) + 4, label, anchor="end")
    for value, label in across.ticks:
        yield _rule(x(value), ceiling + height, x(value), ceiling + height + 4, "axis")
        yield _text(x(value), ceiling + height + 19, label, anchor="middle")
    yield _text(left + width / 2, ceiling + height + 37, across.title, anchor="middle")
    middle = ceiling + height / 2
    turn = f'transform="rotate(-90 12 {middle:g})"'
    yield f'<text x="12" y="{middle:g}" text-anchor="middle" {turn}>{up.title}</text>'
    yield _rule(left, ceiling, left, ceiling + height, "axis")
    yield _rule(left, ceiling + height, left + width, ceiling + height, "axis")
    yield from _curves(drawn, x, y)
    yield from _names(drawn, left + width + 10, y)


def _curves(
    drawn: Sequence[Line], x: Callable[[float], float], y: Callable[[float], float]
) -> Iterator[str]:
    for line in drawn:
        places = [(x(across), y(up)) for across, up in line.points]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
        dashes = ' stroke-dasharray="6 4"' if line.dashed else ""
        stroke = f'fill="none" stroke="{line.colour}" stroke-width="2"{dashes}'
        yield f'<polyline points="{path}" {stroke}/>'
        for px, py in places:
            yield f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.5" fill="{line.colour}"/>'


def _names(drawn: Sequence[Line], left: float, y: Callable[[float], float]) -> Iterator[str]:
    """Return the positions of the lines' names, at least 16 pixels apart."""
    lowest = float("-inf")
    for line in sorted(drawn, key=lambda line: y(line.points[-1][1])):
        lowest = max(lowest + 16, y(line.points[-1][1]) + 4)
        yield f'<text x="{left:g}" y="{lowest:.1f}" style="fill: {line.colour}">{line.label}</text>'


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "") -> str:
    extra = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text x="{x:.5g}" y="{y:.5g}"{extra}>{text}</text>'


def _rule(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    ends = f'x1="{x1:.5g}" y1="{y1:.5g}" x2="{x2:.5g}" y2="{y2:.5g}"'
    return f'<line class="{kind}" {ends}/>'


def _box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height:g}"/>'
