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
from toy_device import toy_cuda

from specbuild.runtime.decode.device.decoder import UNMEASURED_SHARE
from specbuild.runtime.draft.costs import StepContext
from specbuild.runtime.draft.device_costs import prior_costs
from specbuild.runtime.draft.draft_models import RaggedShape
from specbuild.runtime.draft.policy import (
    DraftPolicy,
    FixedPolicy,
    MeasuredPolicy,
    SequenceDepths,
    StepOutcome,
)
from specbuild.runtime.draft.sequence_policy import LearnedPolicies, SequencePolicy
from specbuild.runtime.engine_dir.manifest import DraftShape

CHAINS = tuple(DraftShape(1, depth, depth) for depth in (1, 2, 3, 4))
RAGGED = RaggedShape(1, 4, 4, "", 4)
# Milliseconds of a step by its number of draft tokens.
STEP_MS = {
    "20B, batch 1": (1, (1.209, 1.638, 1.923, 2.210, 2.485)),
    "20B, batch 16": (16, (3.347, 4.157, 4.726, 5.261, 5.936)),
    "120B, batch 1": (1, (1.701, 2.322, 2.786, 3.298, 3.732)),
    "120B, batch 16": (16, (7.572, 11.914, 14.986, 16.957, 18.418)),
}


class PriorCosts:
    """The prior costs of a device."""

    origin = "unknown"

    def __init__(self, batch: int, shapes: tuple[DraftShape, ...] = CHAINS) -> None:
        self.shapes = shapes
        table = prior_costs(shapes, batch=batch)
        times = [table.step_s(s, batch=batch, context=0) for s in (None, *shapes)]
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
    """Steps of a batch. Each level of a chain is accepted with probability ``chance``.

    ``chance`` is that of all sequences, or of each. A ragged step takes ``ragged_ms``.
    """

    batch: int
    step_ms: tuple[float, ...]
    chance: float | np.ndarray
    seed: int
    ragged_ms: float = 0.0
    ms: float = 0.0
    tokens: float = 0.0
    in_flight: deque[StepOutcome] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.warm: set[DraftShape | None] = set()
        self.ragged: list[SequenceDepths] = []
        self.steps = 0

    def decode(self, policy: DraftPolicy, tokens: int) -> float:
        """Return tokens per millisecond and sequence of the next ``tokens`` tokens."""
        start_ms, start = self.ms, self.tokens
        while self.tokens < start + tokens:
            tokens_left = int(start + tokens - self.tokens) + 1
            sequences = tuple(range(self.batch))
            context = StepContext(self.batch, tokens_left, 0, sequences=sequences)
            chosen = policy.shape(context)
            shape = chosen.shape if isinstance(chosen, SequenceDepths) else chosen
            assert shape is None or isinstance(shape, DraftShape)
            depth = 0 if shape is None else shape.draft_depth
            depths = [depth] * self.batch
            mean_ms = self.step_ms[depth]
            if isinstance(chosen, SequenceDepths):
                depths, mean_ms = list(chosen.depths), self.ragged_ms
                self.ragged.append(chosen)
            hits = self.random.random((self.batch, depth)) < np.reshape(self.chance, (-1, 1))
            hits &= np.arange(depth) < np.array(depths)[:, None]
            accepted = np.cumprod(hits, axis=1).sum(axis=1).astype(int).tolist()
            step_ms = mean_ms * (1 + 0.03 * self.random.standard_normal())
            # Some results are read late, and the first step of a program is not timed.
            is_late = self.random.random() < 0.02
            seen_s = 1e-3 * step_ms * (1 + is_late * self.random.exponential(3))
            timed = seen_s if shape in self.warm else None
            self.warm.add(shape)
            outcome = StepOutcome(context, chosen, depths, accepted, timed, sequences=sequences)
            self.in_flight.append(outcome)
            self.steps += 1
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


# Milliseconds of steps of 16 sequences on an H200, chains of 0 to 4: 0.36 for each row of all of
# them and 0.117 for each level. A ragged step has four levels in four rows per sequence.
RAGGED_STEP_MS = tuple(3.369 + 0.477 * depth for depth in range(5))
RAGGED_MS = RAGGED_STEP_MS[4] - 0.36


def decoded(
    shapes: tuple[DraftShape, ...], chances: np.ndarray, seed: int, *, ragged_ms: float = RAGGED_MS
) -> tuple[float, SimulatedDevice]:
    """Return the rate of a policy with these shapes, and the device."""
    device = SimulatedDevice(16, RAGGED_STEP_MS, chances, seed, ragged_ms)
    costs = PriorCosts(16, shapes)
    policy = LearnedPolicies().next(costs, exploration_share=UNMEASURED_SHARE)
    return device.decode(policy, 800), device


def test_ragged_steps_are_timed_and_chosen_where_sequences_differ() -> None:
    """Those with more accepted tokens verify more, and the batch is faster than with one depth.

    A late result can be the only time of a ragged step for a while, so not every run uses them.
    """
    chances = np.linspace(0.4, 0.9, 16)
    ratios, ragged, steps = [], [], 0
    for seed in range(8):
        with_ragged, device = decoded((*CHAINS, RAGGED), chances, seed)
        ratios.append(with_ragged / decoded(CHAINS, chances, seed)[0])
        ragged += device.ragged
        steps += device.steps
    depths = np.mean([chosen.depths for chosen in ragged], axis=0)
    assert len(ragged) > 0.6 * steps
    assert depths[:4].mean() + 1 < depths[12:].mean()
    assert np.mean(ratios) > 1.01


def test_slow_ragged_steps_are_timed_and_left_alone() -> None:
    """Their times are only known from their own steps."""
    chances = np.linspace(0.4, 0.9, 16)
    ratios = []
    for seed in range(4):
        rate, device = decoded((*CHAINS, RAGGED), chances, seed, ragged_ms=1.3 * RAGGED_MS)
        ratios.append(rate / decoded(CHAINS, chances, seed)[0])
        assert 0 < len(device.ragged) < 0.1 * device.steps
    assert np.mean(ratios) > 0.98


def test_equal_sequences_lose_little_by_ragged_steps() -> None:
    for chance in (0.0, 0.5, 0.7):
        chances = np.full(16, chance)
        ratios = [
            decoded((*CHAINS, RAGGED), chances, seed)[0] / decoded(CHAINS, chances, seed)[0]
            for seed in range(4)
        ]
        assert np.mean(ratios) > 0.985


def test_an_engine_without_measured_costs_has_ragged_steps() -> None:
    """With and without logits, so that it can choose between them."""
    decoder = toy_cuda(max_batch_size=4).engine.decoder
    for full_logits in (False, True):
        policy = decoder._default_policy("auto", full_logits=full_logits)
        assert isinstance(policy, SequencePolicy)
        rates = policy._rates(StepContext(4, 100, 0, sequences=(1, 2, 3, 4)))
        ragged = [isinstance(shape, RaggedShape) for shape in policy._options]
        assert any(ragged)
        assert all(rate > 0 for rate, kind in zip(rates, ragged, strict=True) if kind)


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
