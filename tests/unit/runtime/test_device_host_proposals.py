"""Host proposals in late steps of a device: tokens are the same, caches stay intact.

The toy device refuses to read a slot of the draft's cache that was never written.
"""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from left_out import examples
from test_logit_changes import decode_by_definition
from toy_device import ToyCuda, toy_cuda
from toy_engine import run
from toy_model import VOCAB
from toy_plan import BATCHES, DEEPEST, SHAPES

from specbuild.runtime.decode.device.program_costs import ProposalCosts
from specbuild.runtime.decode.device.program_table import ProgramTable
from specbuild.runtime.decode.device.proposals import likeliest_depths
from specbuild.runtime.draft.costs import StepContext
from specbuild.runtime.draft.device_costs import METHOD, ShapeCosts, StepCosts
from specbuild.runtime.draft.host_proposal import (
    WAIT_FOR_TOKENS,
    HostProposal,
    ProposedDepths,
    WaitForTokens,
)
from specbuild.runtime.draft.policy import ChosenDraft, StepOutcome
from specbuild.runtime.engine_dir.drafters.suffix import SuffixRecord
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import RequestError
from specbuild.runtime.request import GenerateParams, SequenceState
from specbuild.runtime.sampling import SamplingParams

LONGEST = 9
RECORD = SuffixRecord(cache_max_depth=6, max_tokens=LONGEST, min_token_prob=0.0, cached_tokens=100)
LIMITS = DraftShape(3, LONGEST, 12)
CHAIN = SHAPES[1]


class Knowing:
    """Propose the known output of each prompt, with occasional errors."""

    def __init__(self, outputs: dict[tuple[int, ...], list[int]], *, errors: float) -> None:
        self._outputs, self._errors = outputs, errors
        self._random = random.Random(5)
        self.released: list[int] = []
        self.offered: list[tuple[int, int]] = []

    def propose_chains(
        self, sequences: Sequence[SequenceState], most: Sequence[int]
    ) -> HostProposal:
        chains = []
        for sequence, count in zip(sequences, most, strict=True):
            rest = self._outputs[sequence.request.prompt_ids][sequence.num_output_tokens :][:count]
            wrong = [self._random.random() < self._errors for _ in rest]
            chains.append([(t + w) % VOCAB for t, w in zip(rest, wrong, strict=True)])
        return HostProposal(chains, tuple((0.9,) * len(chain) for chain in chains))

    def record_result(
        self, sequences: Sequence[SequenceState], depths: Sequence[int], accepted: Sequence[int]
    ) -> None:
        del sequences
        self.offered += zip(depths, accepted, strict=True)

    def release(self, sequence: SequenceState) -> None:
        self.released.append(sequence.index)


class Mixed:
    """Sometimes wait for proposals, use a part of them, or draft with any shape."""

    max_depth, reason = LONGEST, "mixed"

    def __init__(self, *, seed: int, offers: float, shapes: Sequence[DraftShape | None]) -> None:
        self._random, self._offers, self._shapes = random.Random(seed), offers, shapes
        self.outcomes: list[StepOutcome] = []
        self.chosen: list[ChosenDraft] = []

    def shape(self, step_context: StepContext) -> ChosenDraft | WaitForTokens:
        if any(step_context.cumulative_probs) and self._random.random() < self._offers:
            if step_context.has_unread_tokens:
                return WAIT_FOR_TOKENS
            depths = tuple(self._random.randint(0, len(r)) for r in step_context.cumulative_probs)
            if any(depths):
                self.chosen.append(ProposedDepths(depths))
                return self.chosen[-1]
        self.chosen.append(self._random.choice(self._shapes))
        return self.chosen[-1]

    def observe(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)


def costs_of(plain_s: float, offered_s: dict[int, float]) -> StepCosts:
    """Return the same costs for every batch and context."""
    entries = []
    for batch in BATCHES:
        entries.append(ShapeCosts(batch, 0, 0, 0, (64,), (plain_s,), (0.0,)))
        for n, step_s in offered_s.items():
            entries.append(ShapeCosts(batch, 1, n, n, (64,), (step_s,), (0.0,), host_proposal=True))
    return StepCosts("Fake H200", "digest", METHOD, tuple(entries))


def offering(**options: object) -> ToyCuda:
    return toy_cuda(suffix=RECORD, limits=LIMITS, shapes=(*SHAPES, DraftShape(1, 2, 2)), **options)


def mixed(
    policy: Mixed, outputs: dict[tuple[int, ...], list[int]], *, drafted: bool, errors: float
) -> tuple[ToyCuda, Knowing]:
    toy = offering(drafted=drafted, max_batch_size=4)
    toy.engine.decoder._default_policy = lambda _, **__: policy
    knowing = Knowing(outputs, errors=errors)
    toy.engine.decoder._host_drafters["suffix"] = knowing
    return toy, knowing


@examples(8)
@given(
    st.integers(0, 2**31),
    st.booleans(),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([0.0, 0.2]),
    st.sampled_from([0.4, 0.9]),
)
def test_any_order_of_drafts_and_host_proposals_changes_no_token(
    seed: int, drafted: bool, temperature: float, errors: float, offers: float
) -> None:
    """Sequences join and leave: more requests than rows, of any length. Some change logits."""
    draws = np.random.default_rng(seed)
    batch = [draws.integers(0, VOCAB - 1, n).tolist() for n in draws.integers(1, 20, 6)]
    sample = SamplingParams(temperature=temperature, seed=7)
    penalised = replace(sample, frequency_penalty=0.9, repetition_penalty=1.2)
    counts = draws.integers(1, 31, len(batch)).tolist()
    params = [
        GenerateParams(max_new_tokens=n, sampling=penalised if n % 3 == 0 else sample)
        for n in counts
    ]
    expected = [decode_by_definition(*pair) for pair in zip(batch, params, strict=True)]
    shapes = [None, *SHAPES] if drafted else [None]
    policy = Mixed(seed=seed, offers=offers, shapes=shapes)
    outputs = {tuple(ids): tokens for ids, tokens in zip(batch, expected, strict=True)}
    toy, knowing = mixed(policy, outputs, drafted=drafted, errors=errors)
    result = run(toy.engine, batch, params)
    assert result.ids == expected
    assert sorted(knowing.released) == list(range(len(batch)))
    for depth, accepted in knowing.offered:
        assert 0 <= accepted <= depth <= LONGEST
        assert errors or accepted == depth
    for outcome in policy.outcomes:
        for depth, accepted in zip(outcome.depths, outcome.accepted, strict=True):
            assert 0 <= accepted <= depth


def test_long_host_proposals_do_not_change_the_acceptance_of_a_draft() -> None:
    """The accepted part of a chain does not depend on how earlier steps drafted."""
    params = GenerateParams(max_new_tokens=40, ignore_eos=True)
    ids = [3, 1, 4]
    outputs = {tuple(ids): run(toy_cuda().engine, [ids], params, speculation=None).ids[0]}
    steady = Mixed(seed=1, offers=0.0, shapes=[CHAIN])
    run(mixed(steady, outputs, drafted=True, errors=0.0)[0].engine, [ids], params)
    place, found = 4, {}
    for outcome in steady.outcomes:
        found[place] = outcome.accepted
        place += outcome.accepted[0] + 1
    met, longest = 0, 0
    for seed in range(12):
        policy = Mixed(seed=seed, offers=0.6, shapes=[CHAIN])
        run(mixed(policy, outputs, drafted=True, errors=0.0)[0].engine, [ids], params)
        place, behind = 4, 0
        for outcome in policy.outcomes:
            if isinstance(outcome.shape, ProposedDepths):
                behind = outcome.accepted[0]
            elif place in found and behind > DEEPEST and place + CHAIN.draft_depth < 43:
                assert outcome.accepted == found[place]
                met += 1
            longest = max(longest, behind)
            place += outcome.accepted[0] + 1
    assert met >= 3
    assert longest > DEEPEST + 1


def test_a_step_with_a_proposal_starts_when_its_tokens_are_known() -> None:
    """A step after one without a proposal is queued before its tokens are read."""
    params = GenerateParams(max_new_tokens=31, ignore_eos=True)
    outputs = {(1, 2): run(toy_cuda().engine, [[1, 2]], params, speculation=None).ids[0]}
    policy = Mixed(seed=1, offers=1.0, shapes=[None])
    toy, knowing = mixed(policy, outputs, drafted=False, errors=0.0)
    run(toy.engine, [[1, 2]], params)
    assert knowing.offered and all(depth == right for depth, right in knowing.offered)
    steps = [name for name in toy.device.started if name.startswith("step")]
    assert sum("offered-3." in name for name in steps) + sum(
        f"offered-{LONGEST}." in name for name in steps
    ) == len(knowing.offered)
    assert len(steps) < 31 - sum(right for _, right in knowing.offered) + 1


@pytest.mark.parametrize("drafted", [False, True])
def test_text_that_repeats_is_proposed_without_costs_and_with(drafted: bool) -> None:
    """The second answer to a prompt is found, and the counters show it."""
    params = GenerateParams(max_new_tokens=30, ignore_eos=True)
    plain = run(toy_cuda().engine, [[5, 6, 7]], params, speculation=None).ids
    for costs in (None, costs_of(1e-3, {3: 1.1e-3, LONGEST: 1.3e-3})):
        toy = offering(drafted=drafted, step_costs=costs)
        for _ in range(2):
            toy.device.started.clear()
            assert run(toy.engine, [[5, 6, 7]], params, drafter="suffix").ids == plain
        assert any("offered" in name for name in toy.device.started)
        steps = [name for name in toy.device.started if name.startswith("step")]
        assert len(steps) < 20
        assert toy.engine.decoder.host_statistics["suffix"].cached_accepted_tokens > 10
        assert "host proposals in" in toy.engine.default_draft.reason
        assert run(toy.engine, [[5, 6, 7]], params).ids == plain
        assert run(toy.engine, [[5, 6, 7]], params, speculation=None).ids == plain


def test_selects_the_program_with_the_most_tokens_a_second() -> None:
    """All chains of a step have capacity for the longest; the host's time counts for each."""
    toy = offering(drafted=False, max_batch_size=4)
    table = ProgramTable(toy.device.plan)
    costs = costs_of(1e-3, {3: 1.2e-3, LONGEST: 2e-3})
    offers = ProposalCosts(costs, table, full_logits=False)

    def best(*cumulative_probs: Sequence[float]) -> tuple[tuple[int, ...], float]:
        chances = tuple(map(tuple, cumulative_probs))
        return offers.best(
            StepContext(len(cumulative_probs), 50, 0, context=100, cumulative_probs=chances), 1.0
        )

    depths, rate = best([0.9] * 9)
    assert depths == (9,) and 3500 < rate < (1 + 8.1) / 2e-3
    assert best([0.9] * 3 + [0.2] * 2)[0] == (3,)
    assert best([0.9] * 9, [0.5])[0] == (9, 1)
    outcome = StepOutcome(StepContext(1, 50, 0, context=100), ProposedDepths((7,)), [7], [7], 12e-3)
    for _ in range(60):
        offers.learn(outcome, 1.0)
    assert best([0.9] * 9)[1] < rate / 3


@examples(60)
@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0]), max_size=4), min_size=1,
             max_size=4),
    st.integers(0, 16),
)  # fmt: skip
def test_the_likeliest_tokens_of_all_chains_are_proposed(
    chances: list[list[float]], tokens: int
) -> None:
    chains = [list(itertools.accumulate(chain, operator.mul)) for chain in chances]
    depths = likeliest_depths(chains, tokens)

    def expected(cut: Sequence[int]) -> float:
        return sum(sum(chain[:n]) for chain, n in zip(chains, cut, strict=True))

    assert sum(depths) == min(tokens, sum(map(len, chains)))
    every = itertools.product(*(range(len(chain) + 1) for chain in chains))
    best = max(expected(cut) for cut in every if sum(cut) <= tokens)
    assert expected(depths) == pytest.approx(best)


def test_a_short_proposal_of_one_sequence_uses_a_small_step() -> None:
    """A step of two sequences has rows for one chain of 2, or for two of the longest."""
    table = ProgramTable(offering(drafted=False, max_batch_size=4).device.plan)
    for lengths, rows in (((2, 0), 4), ((1, 1), 4), ((3, 0), 20), ((9, 9), 20)):
        assert table.host_chain_step(lengths, batch=2, full_logits=True).rows == rows
    assert table.host_chain_lengths(batch=2, full_logits=False) == (1, LONGEST)
    assert table.host_chain_limits(batch=2, full_logits=False) == (LONGEST, 2 * LONGEST)
    assert table.host_chain_limits(batch=4, full_logits=False) == (0, 0)


def test_top_log_probabilities_with_chains_of_different_lengths() -> None:
    """Lists of likely tokens, penalties and log-probabilities are those without chains."""
    batch = [[3, 1, 4], [1, 5, 9, 2]]
    params = [
        GenerateParams(max_new_tokens=25, ignore_eos=True, top_logprobs=3),
        GenerateParams(
            max_new_tokens=18, top_logprobs=2, sampling=SamplingParams(frequency_penalty=0.9)
        ),
    ]
    plain = run(toy_cuda().engine, batch, params, speculation=None)
    outputs = {tuple(ids): tokens for ids, tokens in zip(batch, plain.ids, strict=True)}
    for seed in range(3):
        policy = Mixed(seed=seed, offers=0.9, shapes=[None])
        toy, knowing = mixed(policy, outputs, drafted=False, errors=0.2)
        found = run(toy.engine, batch, params)
        assert found.ids == plain.ids
        for ours, theirs in zip(found.records, plain.records, strict=True):
            assert ours.logprobs == theirs.logprobs
            assert ours.top_logprobs == theirs.top_logprobs
        assert any(accepted for _, accepted in knowing.offered)
        assert any(name.startswith("step@2.offered") for name in toy.device.started)


def test_an_expensive_step_is_not_used() -> None:
    params = GenerateParams(max_new_tokens=30, ignore_eos=True)
    dear = costs_of(1e-6, {3: 1.0, LONGEST: 1.0})
    toy = offering(drafted=False, step_costs=dear)
    for _ in range(2):
        run(toy.engine, [[5, 6, 7]], params)
    assert not any("offered" in name for name in toy.device.started)


def test_batches_beyond_every_proposal_step_have_no_proposals() -> None:
    params = GenerateParams(max_new_tokens=12, ignore_eos=True)
    batch = [[5, 6, 7], [1], [2], [3]]
    toy = offering(drafted=False, max_batch_size=4)
    for _ in range(2):
        toy.device.started.clear()
        result = run(toy.engine, batch, params)
    assert result.ids == run(toy_cuda().engine, batch, params, speculation=None).ids
    steps = [name for name in toy.device.started if name.startswith("step")]
    assert all(not name.startswith("step@4.offered") for name in steps)


def test_rejects_trees_for_suffix_decoding_alone() -> None:
    toy = offering(drafted=False)
    with pytest.raises(RequestError, match="no steps for the draft"):
        run(toy.engine, [[1]], GenerateParams(), speculation=DraftShape(1, 3, 3))
