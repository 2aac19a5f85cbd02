"""The default draft of a device without measured step times, with a simulated clock.

The times are those of engines on an H200, of GPT-OSS-20B and 120B with an EAGLE3 draft: without a
draft, and with chains of 1 to 4. Two steps are in flight, so a choice never knows the previous
step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest

from specbuild.runtime.decode.device.decoder import UNMEASURED_SHARE
from specbuild.runtime.draft.costs import StepContext
from specbuild.runtime.draft.device_costs import prior_costs
from specbuild.runtime.draft.policy import DraftPolicy, FixedPolicy, MeasuredPolicy, StepOutcome
from specbuild.runtime.engine_dir.manifest import DraftShape

CHAINS = tuple(DraftShape(1, depth, depth) for depth in (1, 2, 3, 4))
# Milliseconds of a step by its number of draft tokens.
STEP_MS = {
    "20B, batch 1": (1, (1.209, 1.638, 1.923, 2.210, 2.485)),
    "20B, batch 16": (16, (3.347, 4.157, 4.726, 5.261, 5.936)),
    "120B, batch 1": (1, (1.701, 2.322, 2.786, 3.298, 3.732)),
    "120B, batch 16": (16, (7.572, 11.914, 14.986, 16.957, 18.418)),
}


class PriorCosts:
    """The prior costs of a device."""

    shapes = CHAINS
    origin = "unknown"

    def __init__(self, batch: int) -> None:
        table = prior_costs(CHAINS, batch=batch)
        times = [table.step_s(s, batch=batch, context=0) for s in (None, *CHAINS)]
        self._times = [time for time in times if time is not None]

    def step_s(self, step_context: StepContext) -> list[float]:
        del step_context
        return self._times

    def catch_up_s(self, shape: DraftShape, step_context: StepContext) -> float:
        del shape, step_context
        return 0.0


def policy_of(batch: int) -> MeasuredPolicy:
    return MeasuredPolicy(PriorCosts(batch), exploration_share=UNMEASURED_SHARE)


@dataclass
class SimulatedDevice:
    """Steps of a batch. Each level of a chain is accepted with probability ``chance``."""

    batch: int
    step_ms: tuple[float, ...]
    chance: float
    seed: int
    ms: float = 0.0
    tokens: float = 0.0
    in_flight: deque[StepOutcome] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.warm: set[int] = set()

    def decode(self, policy: DraftPolicy, tokens: int) -> float:
        """Return tokens per millisecond and sequence of the next ``tokens`` tokens."""
        start_ms, start = self.ms, self.tokens
        while self.tokens < start + tokens:
            context = StepContext(self.batch, int(start + tokens - self.tokens) + 1, 0)
            shape = policy.shape(context)
            assert shape is None or isinstance(shape, DraftShape)
            depth = 0 if shape is None else shape.draft_depth
            hits = self.random.random((self.batch, depth)) < self.chance
            accepted = np.cumprod(hits, axis=1).sum(axis=1).astype(int).tolist()
            step_ms = self.step_ms[depth] * (1 + 0.03 * self.random.standard_normal())
            # Some results are read late, and the first step of a program is not timed.
            is_late = self.random.random() < 0.02
            seen_s = 1e-3 * step_ms * (1 + is_late * self.random.exponential(3))
            timed = seen_s if depth in self.warm else None
            self.warm.add(depth)
            outcome = StepOutcome(context, shape, [depth] * self.batch, accepted, timed)
            self.in_flight.append(outcome)
            if len(self.in_flight) == 2:
                policy.observe(self.in_flight.popleft())
            self.ms += step_ms
            self.tokens += 1 + sum(accepted) / self.batch
        return (self.tokens - start) / (self.ms - start_ms)


@pytest.mark.parametrize("engine", STEP_MS)
def test_a_draft_that_is_never_right_costs_little(engine: str) -> None:
    batch, step_ms = STEP_MS[engine]
    first, later = [], []
    for seed in range(4):
        device, policy = (
            SimulatedDevice(batch, step_ms, 0.0, seed),
            policy_of(batch),
        )
        first.append(device.decode(policy, 256) * step_ms[0])
        later.append(device.decode(policy, 800) * step_ms[0])
    assert min(first) >= 0.93
    assert np.mean(later) >= 0.97


@pytest.mark.parametrize("engine", STEP_MS)
def test_a_draft_that_is_mostly_right_is_as_fast_as_the_best_fixed_chain(engine: str) -> None:
    batch, step_ms = STEP_MS[engine]
    rates, fixed = [], {shape: [] for shape in CHAINS}
    for seed in range(6):
        device, policy = (
            SimulatedDevice(batch, step_ms, 0.7, seed),
            policy_of(batch),
        )
        rates.append(device.decode(policy, 1024))
        for shape, found in fixed.items():
            alone = SimulatedDevice(batch, step_ms, 0.7, seed)
            found.append(alone.decode(FixedPolicy(shape, max_depth=4, reason="fixed"), 1024))
    assert np.mean(rates) >= 0.97 * max(np.mean(found) for found in fixed.values())


def test_greedy_and_sampled_requests_of_a_batch_are_counted_separately() -> None:
    policy = policy_of(4)
    context = StepContext(4, 1000, 0, num_sampled=2)
    for _ in range(40):
        outcome = StepOutcome(
            context, CHAINS[1], [2] * 4, [2, 0, 2, 0], None, [False, True, False, True]
        )
        policy.observe(outcome)
    greedy = policy.acceptance_by_model()[""][0]
    sampled = policy.acceptance_by_model(sampled=True)[""][0]
    assert greedy > 0.85
    assert sampled < 0.15
    rates = {n: policy.best_rate(StepContext(4, 1000, 0, num_sampled=n)) for n in (0, 2, 4)}
    assert rates[0] > rates[2] >= rates[4]
