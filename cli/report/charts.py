"""Charts as SVG inside the page, whose style sheet has their colours for light and dark.

Every mark states its values in a ``title``, and in ``data-x`` and ``data-y``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbuild.cli.report.axis import Axis, number_text
from specbuild.cli.report.markup import escaped

WIDTH = 560
# The number of series colours in the style sheet; further series repeat them.
SERIES = 6
_LEFT, _RIGHT, _TOP, _PLOT = 56, 14, 10, 200


@dataclass(frozen=True)
class Line:
    """Named points; ``joined`` by lines, or separate."""

    label: str
    points: Sequence[tuple[float, float]]
    joined: bool = True


@dataclass(frozen=True)
class Bar:
    """A named amount, its text, its lower bound, and its colour in the style sheet."""

    label: str
    value: float
    text: str
    floor: float | None = None
    colour: str = "s0"


def lines(drawn: Sequence[Line], across: Axis, up: Axis) -> str:
    """Return lines on common axes, with a legend below."""
    width, bottom = WIDTH - _LEFT - _RIGHT, _TOP + _PLOT

    def x(value: float) -> float:
        return _LEFT + width * across.share(value)

    def y(value: float) -> float:
        return bottom - _PLOT * up.share(value)

    parts = []
    for tick in up.ticks():
        parts.append(_rule("grid", _LEFT, y(tick), _LEFT + width, y(tick)))
        parts.append(_text(_LEFT - 6, y(tick) + 4, number_text(tick), "end"))
    for tick in across.ticks():
        parts.append(_rule("axis", x(tick), bottom, x(tick), bottom + 4))
        parts.append(_text(x(tick), bottom + 18, number_text(tick), "middle"))
    parts.append(_rule("axis", _LEFT, bottom, _LEFT + width, bottom))
    parts.append(_text(_LEFT + width / 2, bottom + 36, across.title, "middle"))
    middle = _TOP + _PLOT / 2
    parts.append(
        f'<text x="12" y="{middle:g}" text-anchor="middle" '
        f'transform="rotate(-90 12 {middle:g})">{escaped(up.title)}</text>'
    )
    for number, line in enumerate(drawn):
        places = [(x(a), y(b)) for a, b in line.points]
        if line.joined:
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
            parts.append(f'<polyline class="line s{number % SERIES}" points="{path}"/>')
        for (px, py), (a, b) in zip(places, line.points, strict=True):
            title = f"{line.label}: {number_text(a)}, {number_text(b)}"
            parts.append(_dot(px, py, number, (a, b), title))
    return _svg(bottom + 44, parts) + legend([line.label for line in drawn])


def bars(drawn: Sequence[Bar]) -> str:
    """Return bars below each other, each with its lower bound as a frame.

    Widths are percentages, so that text keeps its size on narrow screens.
    """
    largest = max((max(bar.value, bar.floor or 0.0) for bar in drawn), default=0.0) or 1.0
    parts = []
    for number, bar in enumerate(drawn):
        top = 36 * number
        parts.append(f'<text x="0" y="{top + 14}">{escaped(bar.label)}</text>')
        parts.append(f'<text x="100%" y="{top + 14}" text-anchor="end">{escaped(bar.text)}</text>')
        floor = "" if bar.floor is None else f' data-floor="{bar.floor!r}"'
        title = escaped(f"{bar.label}: {bar.text}")
        parts.append(
            f'<rect class="fill {bar.colour}" x="0" y="{top + 19}" height="12" '
            f'width="{100 * bar.value / largest:.2f}%" data-x="{bar.value!r}"{floor}>'
            f"<title>{title}</title></rect>"
        )
        if bar.floor is not None:
            end = f"{100 * bar.floor / largest:.2f}%"
            place = f'x1="{end}" y1="{top + 16}" x2="{end}" y2="{top + 34}"'
            parts.append(f'<line class="floor" {place}/>')
    body = "\n".join(parts)
    return f'<svg class="bars" height="{36 * len(drawn) + 4}" role="img">\n{body}\n</svg>\n'


def row(drawn: Sequence[Bar]) -> str:
    """Return amounts side by side in one row, by their shares, with a legend below."""
    total = sum(max(bar.value, 0.0) for bar in drawn) or 1.0
    parts, offset = [], 0.0
    for number, bar in enumerate(drawn):
        wide = WIDTH * max(bar.value, 0.0) / total
        parts.append(
            f'<rect class="fill s{number % SERIES}" x="{offset:.2f}" y="0" width="{wide:.2f}" '
            f'height="34" data-x="{bar.value!r}">'
            f"<title>{escaped(f'{bar.label}: {bar.text}')}</title></rect>"
        )
        offset += wide
    return _svg(36, parts) + legend([f"{bar.label}: {bar.text}" for bar in drawn])


def legend(labels: Sequence[str]) -> str:
    """Return the names of the series with their colours."""
    items = "".join(
        f'<li class="s{number % SERIES}">{escaped(label)}</li>'
        for number, label in enumerate(labels)
    )
    return f'<ul class="legend">{items}</ul>\n'


def _svg(height: float, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img">\n{body}\n</svg>\n'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escaped(text)}</text>'


def _rule(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _dot(x: float, y: float, number: int, values: tuple[float, float], title: str) -> str:
    return (
        f'<circle class="fill s{number % SERIES}" cx="{x:.1f}" cy="{y:.1f}" r="3.5" '
        f'data-x="{values[0]!r}" data-y="{values[1]!r}"><title>{escaped(title)}</title></circle>'
    )
