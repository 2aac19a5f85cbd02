"""Ragged steps: any depth of each sequence gives the same tokens and log-probabilities."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from left_out import examples
from test_logit_changes import decode_by_definition
from toy_device import ToyCuda, toy_cuda
from toy_engine import run
from toy_model import VOCAB
from toy_plan import SHAPES

from specbuild.runtime.draft.costs import StepContext
from specbuild.runtime.draft.draft_models import RaggedShape
from specbuild.runtime.draft.policy import ChosenDraft, SequenceDepths, StepOutcome
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.request import GenerateParams
from specbuild.runtime.sampling import SamplingParams

CHAIN = SHAPES[1]
RAGGED = RaggedShape(1, CHAIN.draft_depth, CHAIN.draft_tokens, "", CHAIN.draft_depth)


class AnyDepths:
    """Choose any depths that fit into a ragged step, or any other shape."""

    max_depth, reason = max(shape.draft_depth for shape in SHAPES), "any"

    def __init__(self, seed: int, others: Sequence[DraftShape | None], share: float) -> None:
        self._random, self._others, self._share = random.Random(seed), others, share
        self.chosen: list[ChosenDraft] = []
        self.outcomes: list[StepOutcome] = []

    def shape(self, step_context: StepContext) -> ChosenDraft:
        batch = step_context.batch
        assert len(set(step_context.sequences)) == batch
        if batch == 1 or self._random.random() > self._share:
            self.chosen.append(self._random.choice(self._others))
            return self.chosen[-1]
        depths = [self._random.randint(0, RAGGED.draft_depth) for _ in range(batch)]
        while sum(depths) > batch * (RAGGED.rows_per_sequence - 1):
            depths[depths.index(max(depths))] -= 1
        self.chosen.append(SequenceDepths(RAGGED, tuple(depths)))
        return self.chosen[-1]

    def observe(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)


def deciding(policy: AnyDepths) -> ToyCuda:
    toy = toy_cuda(max_batch_size=4)
    toy.engine.decoder._default_policy = lambda _, **__: policy
    return toy


# Changes of a request's logits; without any, its steps write no logits unless a neighbour's do.
PROCESSORS: list[dict[str, object]] = [
    {},
    {"presence_penalty": 0.8, "frequency_penalty": 0.3},
    {"logit_bias": {3: 2.0, 5: -100.0}, "repetition_penalty": 1.3},
    {"top_p": 0.8},
]


@examples(8)
@example(1, 0.0, 1.0, [0, 1, 2, 0, 3, 1])
@example(2, 1.0, 1.0, [1, 0, 0, 2, 0, 3])
@given(
    st.integers(0, 2**31),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([0.5, 1.0]),
    st.one_of(
        st.just([0] * 6), st.lists(st.integers(0, len(PROCESSORS) - 1), min_size=6, max_size=6)
    ),
)
def test_any_depths_have_the_tokens_and_log_probabilities_of_plain_decoding(
    seed: int, temperature: float, share: float, processors: list[int]
) -> None:
    """Sequences join and leave: more requests than rows, of any length.

    Those with logit processors share steps with the others.
    """
    draws = np.random.default_rng(seed)
    batch = [draws.integers(0, VOCAB - 1, n).tolist() for n in draws.integers(1, 20, 6)]
    params = [
        GenerateParams(
            max_new_tokens=int(n),
            sampling=SamplingParams(temperature=temperature, seed=i, **PROCESSORS[kind]),  # type: ignore[arg-type]
            top_logprobs=3 * (kind % 2),
            min_tokens=kind % 3,
        )
        for i, (n, kind) in enumerate(
            zip(draws.integers(3, 31, len(batch)), processors, strict=True)
        )
    ]
    expected = [decode_by_definition(*pair) for pair in zip(batch, params, strict=True)]
    policy = AnyDepths(seed, [None, *SHAPES], share)
    toy = deciding(policy)
    result = run(toy.engine, batch, params)
    assert result.ids == expected
    plain = run(toy_cuda(max_batch_size=4).engine, batch, params, speculation=None)
    for found, wanted in zip(result.events, plain.events, strict=True):
        assert [event.logprob for event in found] == [event.logprob for event in wanted]
        assert [event.top_logprobs for event in found] == [event.top_logprobs for event in wanted]
    started = [name for name in toy.device.started if ".rows-" in name]
    ragged = [chosen for chosen in policy.chosen if isinstance(chosen, SequenceDepths)]
    # A choice that was made ahead may not be used.
    assert len(ragged) - len(batch) <= len(started) <= len(ragged)
    assert any(processors) or not any(name.endswith(".logits") for name in started)


def test_sequences_with_penalties_have_their_own_depths() -> None:
    """Beside one whose logits do not change, in the step that writes logits."""
    plain = GenerateParams(max_new_tokens=30, ignore_eos=True)
    penalised = replace(plain, sampling=SamplingParams(presence_penalty=0.8), top_logprobs=2)
    policy = AnyDepths(3, [CHAIN], 1.0)
    toy = deciding(policy)
    result = run(toy.engine, [[3, 1, 4], [1, 5], [9, 2, 6, 5]], [plain, penalised, penalised])
    expected = decode_by_definition([9, 2, 6, 5], penalised)
    assert result.ids[2][: len(expected)] == expected and len(expected) > 20
    started = [name for name in toy.device.started if name.endswith(".rows-12.logits")]
    assert len(started) > 8
    ragged = [o for o in policy.outcomes if isinstance(o.shape, SequenceDepths)]
    assert {d for o in ragged for d in o.depths} == set(range(RAGGED.draft_depth + 1))


def test_acceptance_equals_that_of_uniform_steps() -> None:
    """A sequence accepts what its part of the chain permits, and outcomes name the sequences."""
    params = GenerateParams(max_new_tokens=30, ignore_eos=True)
    batch = [[3, 1, 4], [1, 5], [9, 2, 6, 5]]
    policy = AnyDepths(3, [CHAIN], 1.0)
    run(deciding(policy).engine, batch, params)
    ragged = [o for o in policy.outcomes if isinstance(o.shape, SequenceDepths)]
    assert len(ragged) > 8
    for outcome in ragged:
        for sequence, depth, accepted in zip(
            outcome.sequences, outcome.depths, outcome.accepted, strict=True
        ):
            place = outcome.step_context.sequences.index(sequence)
            assert isinstance(outcome.shape, SequenceDepths)
            assert accepted <= depth <= outcome.shape.depths[place]
    assert sum(sum(o.accepted) for o in ragged) > 4
    depths = {d for o in ragged for d in o.depths}
    assert depths == set(range(RAGGED.draft_depth + 1))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_smallest_program_is_started(count: int) -> None:
    policy = AnyDepths(1, [None], 1.0)
    toy = deciding(policy)
    run(toy.engine, [[3, 1]] * count, GenerateParams(max_new_tokens=9, ignore_eos=True))
    rows = {2: 6, 3: 12, 4: 12}[count]
    first = next(name for name in toy.device.started if name.startswith("step"))
    assert first == f"step@{2 if count == 2 else 4}.1-3-3.rows-{rows}"
