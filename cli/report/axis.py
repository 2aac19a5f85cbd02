"""Axes of charts: their ends, and the positions of round numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, floor, log10

_STEPS = (1, 2, 5, 10)
_TICKS = 5


@dataclass(frozen=True)
class Axis:
    """The quantity of an axis, and its ends; the values of ``logarithmic`` ones are positive."""

    title: str
    low: float
    high: float
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """Return the position of a value along the axis, from 0 to 1."""
        if self.logarithmic:
            return (log10(value) - log10(self.low)) / (log10(self.high) - log10(self.low))
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Return round numbers between the ends."""
        if self.logarithmic:
            return [10.0**n for n in range(ceil(log10(self.low)), floor(log10(self.high)) + 1)]
        step = _round_step((self.high - self.low) / _TICKS)
        first, last = ceil(self.low / step), floor(self.high / step)
        return [step * n for n in range(first, last + 1)]


def axis_of(title: str, values: Iterable[float], *, logarithmic: bool = False) -> Axis:
    """Return an axis that includes these values, and 0 unless it is logarithmic."""
    all_values = list(values)
    if logarithmic:
        low, high = 10.0 ** floor(log10(min(all_values))), 10.0 ** ceil(log10(max(all_values)))
        return Axis(title, low, high if high > low else 10 * low, logarithmic=True)
    high = max(all_values, default=1.0)
    return Axis(title, 0.0, 1.05 * high if high > 0 else 1.0)


def number_text(value: float) -> str:
    """Return a number as an axis shows it: ``20``, ``0.05``, ``131k``, ``2e+09``."""
    if 1000 <= abs(value) < 1e6:
        return f"{value / 1000:.3g}k"
    return f"{value:.4g}"


def _round_step(min_step: float) -> float:
    power = 10.0 ** floor(log10(min_step))
    return next(step * power for step in _STEPS if step * power >= min_step * (1 - 1e-9))
