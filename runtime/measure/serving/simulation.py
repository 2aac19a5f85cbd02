"""Simulates requests to an engine's scheduler, with launch times from a table.

Scheduler, loop, pages and draft policy are those of the server; only the launches are simulated.
Prompt chunks, turns, batches and waits for pages therefore follow the engine's own rules.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.decode.emission import Emission
from specbuild.runtime.decode.loop import Loop
from specbuild.runtime.decode.scheduler import Scheduler
from specbuild.runtime.draft.policy import DraftPolicy, FixedPolicy, MeasuredPolicy
from specbuild.runtime.engine_dir.backends import facts_of
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.measure.serving.costs import ServingCosts, ServingDraftCosts
from specbuild.runtime.measure.serving.simulated_stepper import Clock, SimulatedStepper
from specbuild.runtime.request import GenerateParams, Request, TokenEvent

# The number of launches in flight on a device, as in DeviceStepper.
_DEVICE_LAUNCHES = 2


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The load: ``requests`` requests of equal size.

    They arrive at random times, ``rate`` per second, or with ``rate`` None from ``clients``
    concurrent clients, each of which sends the next request after the previous answer.
    ``request_s`` is the time before a request reaches the engine. Arrivals are those of ``bench
    server --rate`` with the same ``seed``.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    rate: float | None = None
    clients: int = 1
    request_s: float = 0.0
    seed: int = 1


@dataclass(frozen=True)
class Served:
    """The times of one request in seconds: arrival, first token and last token."""

    arrival_s: float
    first_s: float
    last_s: float
    tokens: int

    @property
    def ttft_s(self) -> float:
        """The time to the first token (TTFT)."""
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """The time per output token after the first (TPOT), or None for a single token."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else None


@dataclass(frozen=True)
class Simulated:
    """The result; ``busy_share`` is the share of the time in which launches ran."""

    served: tuple[Served, ...]
    duration_s: float
    busy_share: float


def simulate(
    manifest: Manifest,
    costs: ServingCosts,
    traffic: Traffic,
    *,
    acceptance: Sequence[float] = (),
) -> Simulated:
    """Simulate the clients of one engine. Without ``acceptance`` steps have no draft.

    Raises SpecbuildError if a request exceeds the engine's maximum length.
    """
    require_fitting(manifest, traffic)
    budget = traffic.output_tokens
    clock = Clock()
    stepper = SimulatedStepper(
        costs,
        clock,
        max_in_flight=_DEVICE_LAUNCHES if facts_of(manifest.backend).has_plan else 1,
        acceptance=acceptance,
        seed=traffic.seed,
    )
    limits = replace(manifest.limits, max_rows=min(manifest.limits.max_rows, costs.chunk_rows))
    cut = replace(manifest, limits=limits)
    loop = _loop(cut, stepper, _policy(costs, acceptance))
    params = GenerateParams(max_new_tokens=budget, ignore_eos=True)
    request = Request("simulated", (0,) * traffic.prompt_tokens, params, budget)
    arrivals, waiting = _arrivals(traffic)
    arrived: list[float] = []
    times: list[list[float]] = []
    while arrivals or not loop.idle:
        while arrivals and arrivals[0] <= clock.now_s:
            arrived.append(arrivals.popleft())
            times.append([])
            loop.add(request)
        if loop.idle:
            clock.now_s = arrivals[0]
            continue
        for event in loop.turn():
            if isinstance(event, TokenEvent):
                times[event.request].append(clock.now_s)
                if len(times[event.request]) == budget and waiting:
                    waiting -= 1
                    arrivals.append(clock.now_s + traffic.request_s)
    served = [
        Served(at - traffic.request_s, each[0], each[-1], len(each))
        for at, each in zip(arrived, times, strict=True)
    ]
    return Simulated(tuple(served), clock.now_s, clock.busy_s / max(clock.now_s, 1e-12))


def require_fitting(manifest: Manifest, traffic: Traffic) -> None:
    """Raise SpecbuildError if a request exceeds the engine's maximum length."""
    tokens, max_tokens = traffic.prompt_tokens + traffic.output_tokens, manifest.limits.max_seq_len
    if tokens > max_tokens:
        raise SpecbuildError(
            f"{traffic.prompt_tokens} prompt tokens and {traffic.output_tokens} more are {tokens}, "
            f"the engine takes {max_tokens}: ask for less, or build it with a larger --max-seq-len"
        )


def _policy(costs: ServingCosts, acceptance: Sequence[float]) -> DraftPolicy:
    if not acceptance or not costs.shapes:
        return FixedPolicy(None, max_depth=0, reason="no draft")
    return MeasuredPolicy(ServingDraftCosts(costs))


def _loop(manifest: Manifest, stepper: SimulatedStepper, policy: DraftPolicy) -> Loop:
    # Pages are fixed as in executors of the kernels' own plugins.
    facts = facts_of(manifest.backend)
    fixed = facts.has_engines and facts.launches_kernels
    kv = KvPools(manifest.cache_groups, manifest.limits, fixed=fixed)
    emission = Emission((), max_depth=policy.max_depth, text_stream=lambda _: None)
    loop = Loop(stepper, Scheduler(manifest.limits, kv), emission, policy)
    loop.open()
    return loop


def _arrivals(traffic: Traffic) -> tuple[deque[float], int]:
    """Return the arrival times, and the number of requests that follow an answer."""
    if traffic.rate is None:
        first = min(traffic.clients, traffic.requests)
        return deque([traffic.request_s] * first), traffic.requests - first
    generator, at_s = random.Random(traffic.seed), traffic.request_s
    times = []
    for _ in range(traffic.requests):
        times.append(at_s)
        at_s += generator.expovariate(traffic.rate)
    return deque(times), 0
