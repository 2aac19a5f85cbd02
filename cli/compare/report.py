"""What ``compare`` found: fidelity, speed and size of two engines."""

from __future__ import annotations

from dataclasses import dataclass, field

from specbuild.runtime.engine_dir.strict_json import FORMER_KEY
from specbuild.runtime.measure.fidelity import Fidelity


@dataclass(frozen=True)
class EngineSide:
    """One engine: where it is, how it was built, and what it takes.

    ``lossy`` names what may change its output. ``cache_bytes_per_token`` counts the groups that
    keep every token. Speeds are medians over the prompts, None where none was decoded.
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
    """Mean divergence, in nats, of the rows at positions ``first`` to ``last`` of their pieces."""

    first: int
    last: int
    rows: int
    divergence: float


@dataclass(frozen=True)
class Comparison:
    """What ``compare --json`` prints.

    ``speed_ratio`` is the other's tokens a second over the reference's, the median over pairs of
    one prompt. ``judged_from`` is the first position of a piece whose next token is judged.
    """

    reference: EngineSide
    other: EngineSide
    fidelity: Fidelity
    by_position: tuple[PositionBin, ...]
    judged_from: int
    speed_ratio: float | None
