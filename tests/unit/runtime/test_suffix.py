"""Suffix decoding: lossless alone and with a draft, equal to a text search, bounded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_engine import run, toy_engine

from specbuild.runtime.draft.costs import StepContext
from specbuild.runtime.draft.host_proposal import HostProposal, ProposedDepths
from specbuild.runtime.draft.policy import ChosenDraft, StepOutcome
from specbuild.runtime.draft.suffix import SuffixDrafter
from specbuild.runtime.draft.suffix_cache import SuffixCache, SuffixStatistics
from specbuild.runtime.draft.suffix_confidence import Confidence
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.drafters.suffix import SuffixRecord
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import RequestError
from specbuild.runtime.request import GenerateParams
from specbuild.runtime.sampling import SamplingParams

RECORD = SuffixRecord(cache_max_depth=6, max_tokens=4, min_token_prob=0.0, cached_tokens=100)
LOOP = [5, 9, 2, 7] * 4
PROMPTS = [LOOP, [3, 3, 3, 3, 3, 3], [1, 2, 8, 1, 2]]


class Taking:
    """A policy that takes every proposal, sometimes a part, and learns nothing."""

    max_depth, reason = 4, "takes offers"

    def __init__(self, *, seed: int) -> None:
        self._random = random.Random(seed)
        self.taken: list[ProposedDepths] = []

    def shape(self, step_context: StepContext) -> ChosenDraft:
        depths = tuple(
            len(r) - self._random.randint(0, len(r)) // 3 for r in step_context.cumulative_probs
        )
        if not any(depths):
            return self._random.choice([None, DraftShape(1, 2, 2)])
        self.taken.append(ProposedDepths(depths))
        return self.taken[-1]

    def observe(self, outcome: StepOutcome) -> None:
        assert len(outcome.depths) == len(outcome.accepted)


def suffix_engine(*, drafted: bool, record: SuffixRecord = RECORD, **options: object) -> Engine:
    return toy_engine(drafted=drafted, suffix=record, **options)


def params(temperature: float, seed: int = 3, **options: object) -> GenerateParams:
    sampling = SamplingParams(temperature=temperature, seed=seed)
    return GenerateParams(max_new_tokens=24, sampling=sampling, ignore_eos=True, **options)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("drafted", [True, False])
def test_accepting_any_part_of_proposals_changes_no_token(
    drafted: bool, temperature: float
) -> None:
    plain = run(suffix_engine(drafted=drafted), PROMPTS, params(temperature), speculation=None)
    for seed in range(4):
        # A loop goes on with the policy that it began with: each has an engine of its own.
        engine, policy = suffix_engine(drafted=drafted), Taking(seed=seed)
        engine.decoder._default_policy = lambda *_, _policy=policy, **__: _policy
        assert run(engine, PROMPTS, params(temperature)).ids == plain.ids
        assert policy.taken


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", ["auto", "suffix"])
@pytest.mark.parametrize("speculation", ["default", DraftShape(1, 3, 3)])
def test_suffix_decoding_by_name_changes_no_token(
    name: str, speculation: object, temperature: float
) -> None:
    engine = suffix_engine(drafted=True)
    plain = run(engine, PROMPTS, params(temperature), speculation=None)
    for _ in range(3):
        options = dict(speculation=speculation, drafter=name)
        assert run(engine, PROMPTS, params(temperature), **options).ids == plain.ids


def test_an_engine_without_weights_drafts_from_the_second_time_on() -> None:
    """The second run proposes all of the first output, so it has far fewer steps."""
    engine = suffix_engine(drafted=False)
    asked = dict(speculation=DraftShape(1, 4, 4), drafter="suffix")
    first, second = (run(engine, [LOOP], params(0.0), **asked) for _ in range(2))
    assert first.ids == second.ids
    assert second.records[0].stats.steps <= 7
    assert not any(role.startswith("draft") for role, _ in engine.executor.launches)


def test_cached_texts_are_separate_for_each_salt() -> None:
    engine, salts = suffix_engine(drafted=False), ("a", "b", "a")
    asked = dict(speculation=DraftShape(1, 4, 4), drafter="suffix")
    counted = []
    for salt in salts:
        run(engine, [[8, 1, 6]], params(0.0, cache_salt=salt), **asked)
        statistics = engine.decoder.host_statistics["suffix"]
        counted.append(statistics.kept_tokens)
    assert counted == [28, 56, 84]
    trees = engine.decoder._drafting._host_drafters["suffix"]._cache._by_salt
    assert {salt: len(kept.texts) for salt, kept in trees.items()} == {"a": 2, "b": 1}


def test_rejects_trees_with_branches() -> None:
    with pytest.raises(RequestError, match="drafter suffix proposes only chains; set it to 1"):
        run(suffix_engine(drafted=True), [LOOP], params(0.0), drafter="suffix",
            speculation=DraftShape(2, 2, 3))  # fmt: skip


def offered(drafter: SuffixDrafter, text: Sequence[int], most: int = 4) -> list[int]:
    """Return the proposal of a new drafter after a text."""
    engine = suffix_engine(drafted=False, max_seq_len=256)
    requests = engine.check_prompts([_prompt(text)], params(0.0))
    state = _State(np.array(text, np.int32), len(text), requests[0])
    proposal = drafter.propose_chains([state], [most])  # type: ignore[list-item]
    assert all(
        a >= b
        for a, b in zip(
            proposal.cumulative_probs[0], proposal.cumulative_probs[0][1:], strict=False
        )
    )
    return list(proposal.tokens[0][: len(proposal.cumulative_probs[0])])


class _State:
    index, finish_reason = 0, None

    def __init__(self, ids: np.ndarray, num_tokens: int, request: object) -> None:
        self.ids, self.num_tokens, self.request = ids, num_tokens, request


def _prompt(text: Sequence[int]) -> object:
    from toy_engine import prompt

    return prompt(text)


@given(st.lists(st.integers(0, 2), min_size=2, max_size=30))
@settings(deadline=None, max_examples=60)
def test_the_longest_match_is_followed(text: list[int]) -> None:
    """If the longest earlier suffix has one follower, it is proposed."""
    found = offered(SuffixDrafter(replace(RECORD, cache_max_depth=30)), text)
    for n in range(len(text) - 1, 0, -1):
        tail = text[-n:]
        followers = {text[i + n] for i in range(len(text) - n) if text[i : i + n] == tail}
        if followers:
            break
    else:
        assert found == []
        return
    if len(followers) == 1 and n > 3:
        assert found[0] in followers


def test_short_matches_give_short_proposals() -> None:
    """After a match of one token the probabilities fall at once, after many tokens they do not."""
    record = SuffixRecord(cache_max_depth=24, max_tokens=24, min_token_prob=0.3)
    tail = list(range(10, 28))
    long_one = offered(SuffixDrafter(record), [*tail, 4, 5, 6, 7, 8, 9, 3, 2, *tail[:12]], 24)
    short_one = offered(SuffixDrafter(record), [*tail, 4, 5, 10], 24)
    assert long_one[:6] == tail[12:18] and len(long_one) > 3 * len(short_one) > 0
    nothing = offered(SuffixDrafter(record), [1, 2, 3, 4, 5], 24)
    assert nothing == []


def test_confidence_is_learned_from_acceptance() -> None:
    confidence, shares = Confidence(), [1.0] * 6
    before = confidence.cumulative(shares, 4, 0.0)
    for _ in range(50):
        confidence.learn(shares, 4, [False])
    low = confidence.cumulative(shares, 4, 0.0)
    assert low[0] < 0.3 * before[0]
    for _ in range(200):
        confidence.learn(shares, 4, [True] * 6)
    high = confidence.cumulative(shares, 4, 0.0)
    assert high[0] > before[0] and high[-1] > 0.9
    assert confidence.cumulative(shares, 4, 0.95) == tuple(p for p in high if p >= 0.95)


def test_the_stated_confidence_converges_to_the_acceptance() -> None:
    """If proposals are right with probability p, the stated confidence converges to p."""
    confidence, draws = Confidence(), np.random.default_rng(0)
    for _ in range(4000):
        confidence.learn([1.0], 8, [bool(draws.random() < 0.6)])
    assert confidence.cumulative([1.0], 8, 0.0)[0] == pytest.approx(0.6, abs=0.1)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 12)), max_size=25))
@settings(deadline=None, max_examples=60)
def test_the_cache_is_bounded_and_evicts_by_use(added: list[tuple[str, int]]) -> None:
    statistics = SuffixStatistics()
    cache = SuffixCache(5, 30, statistics)
    kept: list[tuple[str, int]] = []
    for salt, length in added:
        cache.add(salt, [ord(salt) % 7] * length)
        order = [s for s in dict.fromkeys(s for s, _ in kept) if s != salt]
        kept = [*kept, (salt, length + 1)]
        order = [s for s in cache._by_salt if s != salt] if order else []
        assert statistics.kept_tokens <= 30
        assert list(cache._by_salt)[-1] == salt
    total = sum(length + 1 for _, length in added)
    assert statistics.kept_tokens + statistics.evicted_tokens == total
    trees = [held.tree for held in cache._by_salt.values()]
    assert sum(tree.tokens for tree in trees) == statistics.kept_tokens
    SuffixCache(5, 0, statistics).add("a", [1, 2, 3])


def test_an_offer_as_trees_has_a_chain_for_each() -> None:
    trees = HostProposal([[4, 5, 6], [], [7]], ((0.9, 0.8, 0.7), (), (0.5,))).trees(
        [1, 2, 3], [2, 0, 1]
    )
    assert trees.count.tolist() == [3, 1, 2] and trees.contiguous and not trees.full
    assert trees.tokens.tolist() == [[1, 4, 5], [2, -1, -1], [3, 7, -1]]
    assert HostProposal([[]], ((),)).trees([9], [0]).nodes == 0
