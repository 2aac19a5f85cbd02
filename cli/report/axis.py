"""Axes of charts: their ends, and where round numbers stand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, floor, log10

_STEPS = (1, 2, 5, 10)
_TICKS = 5


@dataclass(frozen=True)
class Axis:
    """What an axis measures, and its ends; ``logarithmic`` ones are above 0."""

    title: str
    low: float
    high: float
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """How far along the axis a value stands, from 0 to 1."""
        if self.logarithmic:
            return (log10(value) - log10(self.low)) / (log10(self.high) - log10(self.low))
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round numbers between the ends."""
        if self.logarithmic:
            return [10.0**n for n in range(ceil(log10(self.low)), floor(log10(self.high)) + 1)]
        step = _round_step((self.high - self.low) / _TICKS)
        first, last = ceil(self.low / step), floor(self.high / step)
        return [step * n for n in range(first, last + 1)]


def axis_of(title: str, values: Iterable[float], *, logarithmic: bool = False) -> Axis:
    """An axis that holds these values, and 0 unless it is logarithmic."""
    found = list(values)
    if logarithmic:
        low, high = 10.0 ** floor(log10(min(found))), 10.0 ** ceil(log10(max(found)))
        return Axis(title, low, high if high > low else 10 * low, logarithmic=True)
    high = max(found, default=1.0)
    return Axis(title, 0.0, 1.05 * high if high > 0 else 1.0)


def number_text(value: float) -> str:
    """A number beside an axis: ``20``, ``0.05``, ``131k``, ``2e+09``."""
    if 1000 <= abs(value) < 1e6:
        return f"{value / 1000:.3g}k"
    return f"{value:.4g}"


def _round_step(least: float) -> float:
    power = 10.0 ** floor(log10(least))
    return next(step * power for step in _STEPS if step * power >= least * (1 - 1e-9))
