"""The report of ``compare``: accuracy, speed and size of two engines."""

from __future__ import annotations

from dataclasses import dataclass, field

from specbuild.runtime.engine_dir.strict_json import FORMER_KEY
from specbuild.runtime.measure.fidelity import Fidelity


@dataclass(frozen=True)
class EngineSide:
    """One engine: its directory, its build, and its sizes.

    ``lossy`` names the properties that may change its output. ``cache_bytes_per_token`` counts the
    groups without a window. Speeds are medians over the prompts, None if none was decoded.
    """

    path: str
    backend: str
    lossy: tuple[str, ...]
    weights_bytes: int
    cache_bytes_per_token: float
    draft: str
    tokens_per_s: float | None
    ttft_s: float | None
    tokens_per_step: float | None = field(metadata={FORMER_KEY: "tokens_a_step"})


@dataclass(frozen=True)
class PositionBin:
    """The mean divergence in nats of rows at positions ``first`` to ``last`` of the pieces."""

    first: int
    last: int
    rows: int
    divergence: float


@dataclass(frozen=True)
class Comparison:
    """The output of ``compare --json``.

    ``speed_ratio`` is the other's tokens per second divided by the reference's, the median over
    prompts. ``judged_from`` is the first evaluated position of a piece.
    """

    reference: EngineSide
    other: EngineSide
    fidelity: Fidelity
    by_position: tuple[PositionBin, ...]
    judged_from: int
    speed_ratio: float | None
