"""The report of ``bench server``: what clients of a loaded server see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    worst: float


@dataclass(frozen=True)
class LoadReport:
    """The result. ``worst_gap_s`` is over the longest gap of each request."""

    server: str
    model: str
    requests: int
    clients: int | None
    rate: float | None
    duration_s: float
    errors: int
    first_error: str | None
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    ttft_s: Spread | None
    tpot_s: Spread | None
    gap_s: Spread | None
    worst_gap_s: Spread | None
    e2e_s: Spread | None


def spread(values: Sequence[float]) -> Spread | None:
    """Return the distribution of values; None if there are none."""
    if not values:
        return None
    ordered = sorted(values)
    p50, p90, p99 = (
        ordered[min(len(ordered) - 1, len(ordered) * percentile // 100)]
        for percentile in (50, 90, 99)
    )
    return Spread(mean(ordered), p50, p90, p99, ordered[-1])
