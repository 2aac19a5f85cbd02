"""The policy with a depth for each sequence: which levels it chooses, and when."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from left_out import examples

from specbuild.runtime.draft.costs import StepContext
from specbuild.runtime.draft.draft_models import RaggedShape
from specbuild.runtime.draft.policy import SequenceDepths, StepOutcome
from specbuild.runtime.draft.sequence_policy import (
    KEPT_SEQUENCES,
    PRIOR_TOKENS,
    SequenceAcceptance,
    SequencePolicy,
    likeliest_parts,
)
from specbuild.runtime.engine_dir.manifest import DraftShape

CHAINS = tuple(DraftShape(1, depth, depth) for depth in range(1, 5))
RAGGED = RaggedShape(1, 4, 4, "", 3)
PLAIN_S, ROW_S, LEVEL_S = 3e-3, 6e-5, 8e-5


class Costs:
    """A step has a time for each row and each level."""

    origin = "given"

    def __init__(self, *, ragged_s: float | None = None) -> None:
        self.shapes = (*CHAINS, RAGGED)
        self._ragged_s = ragged_s

    def step_s(self, step_context: StepContext) -> list[float]:
        batch = step_context.batch

        def seconds(rows: int, depth: int) -> float:
            return PLAIN_S + batch * rows * ROW_S + depth * LEVEL_S

        found = [seconds(1, 0), *(seconds(s.draft_depth + 1, s.draft_depth) for s in CHAINS)]
        return [*found, self._ragged_s or seconds(RAGGED.rows_per_sequence, RAGGED.draft_depth)]

    def catch_up_s(self, shape: DraftShape, step_context: StepContext) -> float:
        del shape, step_context
        return 0.0


def simulate(
    policy: SequencePolicy, chances: list[float], steps: int, *, seed: int = 3
) -> list[object]:
    """Return the choices, if each sequence accepts a level with its own probability."""
    random, costs, chosen = np.random.default_rng(seed), Costs(), []
    context = StepContext(len(chances), 10_000, 0, sequences=tuple(range(7, 7 + len(chances))))
    for _ in range(steps):
        choice = policy.shape(context)
        chosen.append(choice)
        shape = choice.shape if isinstance(choice, SequenceDepths) else choice
        depths = [0 if shape is None else shape.draft_depth] * len(chances)
        depths = list(choice.depths) if isinstance(choice, SequenceDepths) else depths
        accepted = []
        for chance, depth in zip(chances, depths, strict=True):
            hits = random.random(depth) < chance
            accepted.append(depth if hits.all() else int(np.argmin(hits)))
        kinds = [None, *costs.shapes]
        step_s = costs.step_s(context)[kinds.index(shape)]
        sequences = context.sequences
        policy.observe(StepOutcome(context, choice, depths, accepted, step_s, sequences=sequences))
    return chosen


@examples(100)
@given(st.data(), st.integers(1, 4), st.integers(1, 4))
def test_the_best_division_equals_that_of_all_divisions(
    data: st.DataObject, batch: int, depth: int
) -> None:
    chances = st.sampled_from([0.0, 0.25, 0.5, 1.0])
    rows = data.draw(st.lists(st.lists(chances, min_size=depth, max_size=depth), min_size=batch,
                              max_size=batch))  # fmt: skip
    survival, tokens = np.cumprod(rows, axis=1), data.draw(st.integers(0, batch * depth))
    depths, expected = likeliest_parts(survival, tokens)
    assert depths.sum() == tokens and (depths <= depth).all()
    assert expected == pytest.approx(sum(survival[b, :d].sum() for b, d in enumerate(depths)))
    every = product(range(depth + 1), repeat=batch)
    best = max(
        sum(survival[b, :d].sum() for b, d in enumerate(choice))
        for choice in every
        if sum(choice) == tokens
    )
    assert expected == pytest.approx(best)


def test_a_sequence_is_estimated_from_its_own_counts() -> None:
    acceptance = SequenceAcceptance()
    assert acceptance.survival([1], [0.5, 0.4]).tolist() == [[0.5, 0.2]]
    acceptance.learn([1, 2], [3, 3], [3, 0])
    good, bad = acceptance.survival([1, 2], [0.5])[:, 0]
    assert good == pytest.approx((3 + 0.5 * PRIOR_TOKENS) / (3 + PRIOR_TOKENS))
    assert bad == pytest.approx(0.5 * PRIOR_TOKENS / (1 + PRIOR_TOKENS))
    acceptance.learn([1], [0], [0])
    assert acceptance.survival([1], [0.5])[0, 0] == pytest.approx(good)
    acceptance.learn(range(10, 10 + 2 * KEPT_SEQUENCES), [1] * 2 * KEPT_SEQUENCES,
                     [1] * 2 * KEPT_SEQUENCES)  # fmt: skip
    acceptance.forget([2])
    unknown, known = acceptance.survival([1, 2], [0.5])[:, 0]
    assert (unknown, known) == (0.5, pytest.approx(bad))


def test_sequences_that_accept_more_verify_more() -> None:
    chances = [0.95, 0.95, 0.2, 0.2, 0.2, 0.95]
    chosen = simulate(SequencePolicy(Costs()), chances, 120)[40:]
    ragged = [choice for choice in chosen if isinstance(choice, SequenceDepths)]
    assert len(ragged) > 0.8 * len(chosen)
    means = np.mean([choice.depths for choice in ragged], axis=0)
    assert min(means[[0, 1, 5]]) > 3 and max(means[[2, 3, 4]]) < 1.5
    for choice in ragged:
        assert sum(choice.depths) == len(chances) * (RAGGED.rows_per_sequence - 1)


def test_equal_sequences_use_the_best_common_chain() -> None:
    """All verify what the best chain has; a ragged step costs levels that none of them uses."""
    chosen = simulate(SequencePolicy(Costs()), [0.6] * 8, 200)[50:]
    plain = [choice for choice in chosen if not isinstance(choice, SequenceDepths)]
    assert len(plain) > 0.6 * len(chosen)


def test_a_slow_ragged_step_is_not_used() -> None:
    chosen = simulate(SequencePolicy(Costs(ragged_s=9e-3)), [0.95, 0.2, 0.2, 0.95], 100)
    assert not any(isinstance(choice, SequenceDepths) for choice in chosen[20:])


def test_without_sequences_no_step_is_ragged() -> None:
    policy = SequencePolicy(Costs())
    choice = policy.shape(StepContext(4, 1000, 0))
    assert choice is None or type(choice) is DraftShape


def test_greedy_and_sampled_requests_are_estimated_from_their_own_rates() -> None:
    """A sequence without counts has the estimates of its batch's kinds."""
    policy = SequencePolicy(Costs())
    rates = []
    for num_sampled in (0, 2, 4):
        context = StepContext(4, 1000, 0, num_sampled=num_sampled, sequences=(1, 2, 3, 4))
        rates.append(policy.best_rate(context))
    assert rates[0] > rates[1] > rates[2]
