"""Simulates one engine under the traffic, and the number of replicas that the targets need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from specbuild.cli.estimate.options import TargetOptions
from specbuild.cli.estimate.report import EstimateReport, Replicas, spreads
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.measure.serving.costs import ServingCosts
from specbuild.runtime.measure.serving.simulation import Simulated, Traffic, simulate

_MAX_REPLICAS = 1 << 20


def predict(
    name: str,
    manifest: Manifest,
    costs: ServingCosts,
    traffic: Traffic,
    *,
    targets: TargetOptions,
    acceptance: float,
) -> EstimateReport:
    """Return the report. Raises SpecbuildError if no number of replicas reaches the targets."""
    chances = (acceptance,) if acceptance else ()

    def served(asked: Traffic) -> Simulated:
        return simulate(manifest, costs, asked, acceptance=chances)

    simulated = served(traffic)
    ttft, tpot, request = spreads(simulated)
    tokens = sum(each.tokens for each in simulated.served)
    replicas = None
    if targets.given():
        if traffic.rate is None:
            raise SpecbuildError("targets are for a --rate: give one in place of --clients")
        replicas = replace(_replicas(served, traffic, targets), gpus=manifest.ranks)
    return EstimateReport(
        engine=name,
        machine=costs.machine,
        rate=traffic.rate,
        clients=traffic.clients if traffic.rate is None else None,
        prompt_tokens=traffic.prompt_tokens,
        output_tokens=traffic.output_tokens,
        requests=traffic.requests,
        acceptance=acceptance,
        ttft_s=ttft,
        tpot_s=tpot,
        e2e_s=request,
        requests_per_s=len(simulated.served) / simulated.duration_s,
        output_tokens_per_s=tokens / simulated.duration_s,
        busy_share=simulated.busy_share,
        replicas=replicas,
    )


def _replicas(
    served: Callable[[Traffic], Simulated], traffic: Traffic, targets: TargetOptions
) -> Replicas:
    """Return the minimum number of replicas, by doubling and then bisection."""
    assert traffic.rate is not None
    rate = traffic.rate
    tried: dict[int, tuple[Replicas, bool]] = {}

    def holds(count: int) -> bool:
        share = rate / count
        ttft, tpot, _ = spreads(served(replace(traffic, rate=share)))
        p90 = None if tpot is None else tpot.p90
        fits = _within(ttft.p90, targets.target_ttft_ms) and _within(p90, targets.target_tpot_ms)
        tried[count] = (Replicas(count, share, ttft.p90, p90), fits)
        return fits

    upper = 1
    while not holds(upper):
        upper *= 2
        if upper > _MAX_REPLICAS:
            alone = tried[_MAX_REPLICAS][0]
            raise SpecbuildError(
                f"no number of replicas meets the targets: a single request has a TTFT of "
                f"{1e3 * alone.ttft_p90_s:.1f} ms"
            )
    lower = upper // 2
    while upper - lower > 1:
        middle = (lower + upper) // 2
        lower, upper = (lower, middle) if holds(middle) else (middle, upper)
    return tried[upper][0]


def _within(value_s: float | None, most_ms: float | None) -> bool:
    return most_ms is None or value_s is None or 1e3 * value_s <= most_ms
