"""The report of ``estimate``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbuild.cli.bench.server.report import Spread, spread
from specbuild.runtime.measure.serving.simulation import Simulated


@dataclass(frozen=True)
class Replicas:
    """The fewest engines among which the rate is shared evenly so that the targets hold.

    ``ttft_p90_s`` and ``tpot_p90_s`` are those of each; ``requests_per_s`` what each is given.
    Each runs on ``gpus`` GPUs; on a CPU this is 1.
    """

    count: int
    requests_per_s: float
    ttft_p90_s: float
    tpot_p90_s: float | None
    gpus: int = 1


@dataclass(frozen=True)
class EstimateReport:
    """The output of ``estimate --json``: one engine under all traffic, and replicas.

    ``busy_share`` of the time launches run; where requests come faster than they are served it is
    1, and times grow with the number of requests.
    """

    engine: str
    machine: str
    rate: float | None
    clients: int | None
    prompt_tokens: int
    output_tokens: int
    requests: int
    acceptance: float
    ttft_s: Spread
    tpot_s: Spread | None
    e2e_s: Spread
    requests_per_s: float
    output_tokens_per_s: float
    busy_share: float
    replicas: Replicas | None


def spreads(found: Simulated) -> tuple[Spread, Spread | None, Spread]:
    """Times to the first token, a token behind it, and of whole requests."""
    ttft = _spread([served.ttft_s for served in found.served])
    tpot = spread([s.tpot_s for s in found.served if s.tpot_s is not None])
    return ttft, tpot, _spread([s.last_s - s.arrival_s for s in found.served])


def _spread(values: Sequence[float]) -> Spread:
    found = spread(values)
    assert found is not None
    return found
