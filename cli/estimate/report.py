"""The report of ``estimate``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbuild.cli.bench.server.report import Spread, spread
from specbuild.runtime.measure.serving.simulation import Simulated


@dataclass(frozen=True)
class Replicas:
    """The minimum number of engines that reach the targets if they share the rate evenly.

    ``ttft_p90_s`` and ``tpot_p90_s`` are those of each engine, and ``requests_per_s`` is its rate.
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

    ``busy_share`` is the share of time in which launches run. If requests arrive faster than they
    are served it is 1, and times grow with the number of requests.
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


def spreads(simulated: Simulated) -> tuple[Spread, Spread | None, Spread]:
    """Return the distributions of TTFT, TPOT and request time."""
    ttft = _spread([served.ttft_s for served in simulated.served])
    tpot = spread([s.tpot_s for s in simulated.served if s.tpot_s is not None])
    return ttft, tpot, _spread([s.last_s - s.arrival_s for s in simulated.served])


def _spread(values: Sequence[float]) -> Spread:
    simulated = spread(values)
    assert simulated is not None
    return simulated
