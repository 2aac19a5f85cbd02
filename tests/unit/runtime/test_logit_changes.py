"""Biases, penalties, min-p, min_tokens and likely tokens: by definition, with any draft.

The references are transformers' logit processors and plain torch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from toy_engine import ON_DEMAND, TreeOfTokens, prompt, repeating, right, run, toy_engine
from toy_model import EOS, VOCAB, choose, target_logits
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
)

from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.decode.logit_rows import adjust, most_likely
from specbuild.runtime.draft.tree import chain_trees
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import RequestError
from specbuild.runtime.request import GenerateParams
from specbuild.runtime.sampling import SamplingParams

PROMPTS = [[1, 2, 3, 2, 9], [4] * 11, [7, 5]]
SHAPES = [None, DraftShape(1, 3, 3), DraftShape(3, 4, 12)]

penalty = st.sampled_from([0.0, 0.7, -1.3])
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.8]),
    seed=st.integers(0, 2**31 - 1),
    top_k=st.sampled_from([0, 6]),
    min_p=st.sampled_from([0.0, 0.3]),
    presence_penalty=penalty,
    frequency_penalty=penalty,
    repetition_penalty=st.sampled_from([1.0, 1.4, 0.8]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=3),
)


def changed_logits(tokens: list[int], prompt_tokens: int, params: GenerateParams) -> torch.Tensor:
    """Return the logits that the next token is sampled from, fp32 [1, V]."""
    sampling, ids = params.sampling, torch.tensor([tokens])
    scores = torch.from_numpy(target_logits(tokens))[None].clone()
    for token, bias in dict(sampling.logit_bias).items():
        scores[0, token] += bias
    if params.min_tokens:
        ends = [EOS, *params.stop_token_ids]
        waits = MinNewTokensLengthLogitsProcessor(prompt_tokens, params.min_tokens, ends)
        scores = waits(ids, scores)
    scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, scores)
    for token, count in Counter(tokens[prompt_tokens:]).items():
        scores[0, token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    if sampling.min_p and sampling.temperature:
        kept = MinPLogitsWarper(sampling.min_p)(ids, scores / sampling.temperature)
        scores = scores.masked_fill(kept == -torch.inf, -torch.inf)
    return scores


def decode_by_definition(ids: list[int], params: GenerateParams) -> list[int]:
    tokens = list(ids)
    for _ in range(params.max_new_tokens):
        scores = changed_logits(tokens, len(ids), params)[0].numpy()
        tokens.append(choose(scores, params.sampling, len(tokens) - 1)[0])
        if tokens[-1] in (EOS, *params.stop_token_ids):
            break
    return tokens[len(ids) :]


@settings(max_examples=6, deadline=None)
@example(SamplingParams(logit_bias={EOS: 100}), 5, SHAPES[1])
@example(SamplingParams(0.8, frequency_penalty=1.5, min_p=0.3), 0, SHAPES[2])
@given(samplings, st.integers(0, 12), st.sampled_from(SHAPES))
def test_any_draft_has_the_tokens_of_the_definition(
    sampling: SamplingParams, least: int, shape: DraftShape | None
) -> None:
    params = GenerateParams(
        max_new_tokens=12, sampling=sampling, min_tokens=least, stop_token_ids=(6,)
    )
    # One request has no logit processors: its tokens are those that it has alone.
    plain = replace(params, sampling=SamplingParams(sampling.temperature, seed=3), min_tokens=0)
    each = [params, plain, params]
    decoded = run(toy_engine(), PROMPTS, each, speculation=shape).ids
    wanted = [decode_by_definition(*pair) for pair in zip(PROMPTS, each, strict=True)]
    assert decoded == wanted
    assert all(len(ids) > least or ids[-1] not in (EOS, 6) for ids in (decoded[0], decoded[2]))


def test_drafts_stay_on_for_all_of_them() -> None:
    sampling = SamplingParams(
        0.8, min_p=0.1, frequency_penalty=0.4, logit_bias={1: 2.0}, repetition_penalty=1.1
    )
    params = GenerateParams(max_new_tokens=24, sampling=sampling, ignore_eos=True)
    plain = run(toy_engine(), PROMPTS[:1], params, speculation=None)
    drafter = TreeOfTokens(repeating, [-1, 0, 1])
    drafted = run(toy_engine(), PROMPTS[:1], params, drafter=drafter)
    assert drafted.ids == plain.ids
    oracle = TreeOfTokens(lambda s, path, _: plain.ids[0][s.num_output_tokens + len(path)], [-1, 0])
    params = replace(params, max_new_tokens=22)
    assert run(toy_engine(), PROMPTS[:1], params, drafter=oracle).records[0].stats.steps == 7


def test_few_pages_change_nothing() -> None:
    params = GenerateParams(
        max_new_tokens=30,
        sampling=SamplingParams(1.0, frequency_penalty=0.9, repetition_penalty=1.2, seed=4),
        ignore_eos=True,
        top_logprobs=2,
    )
    whole = run(toy_engine(), PROMPTS, params, speculation=None)
    engine = toy_engine(ON_DEMAND, kv_pages=22)
    few = run(engine, PROMPTS, params, speculation=SHAPES[1])
    assert sum(record.stats.preemptions for record in few.records) > 0
    assert few.ids == whole.ids
    assert [r.top_logprobs for r in few.records] == [r.top_logprobs for r in whole.records]


def test_draws_follow_the_distribution_that_min_p_leaves() -> None:
    logits = np.array([1.0, 0.5, 0.0, -0.2, -3.0, 0.9], np.float32)
    params = GenerateParams(sampling=SamplingParams(0.7, min_p=0.2))
    row, none = logits.copy(), np.zeros(0, np.int32)
    adjust(row, params, prompt=none, output=none, eos_token_ids=())
    draws = 6000
    column = torch.ones(draws)
    choice, _ = op_named("Choose").reference(
        torch.from_numpy(row).expand(draws, -1),
        0.7 * column,
        torch.zeros(draws, dtype=torch.int32),
        column,
        torch.arange(draws, dtype=torch.int32),
        torch.full((draws,), 17, dtype=torch.int32),
    )
    p = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum()
    left = np.where(p >= 0.2 * p.max(), p, 0) / p[p >= 0.2 * p.max()].sum()
    counts, kept = np.bincount(choice, minlength=len(logits)), left > 0
    assert counts[~kept].sum() == 0 and kept.sum() == 4
    expected = draws * left[kept]
    # Chi-square with 3 degrees of freedom is above this once in a thousand.
    assert ((counts[kept] - expected) ** 2 / expected).sum() < 16.27


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(0.9, min_p=0.2, presence_penalty=1.0, seed=2)]
)
def test_top_log_probabilities_are_computed_from_the_raw_logits(
    shape: DraftShape | None, sampling: SamplingParams
) -> None:
    params = GenerateParams(max_new_tokens=16, sampling=sampling, top_logprobs=5, ignore_eos=True)
    others = replace(params, top_logprobs=0)
    ran = run(toy_engine(), PROMPTS[:2], [params, others], speculation=shape)
    tokens = list(PROMPTS[0])
    for event, stored in zip(ran.events[0], ran.records[0].top_logprobs or (), strict=True):
        wanted = torch.from_numpy(target_logits(tokens)).double().log_softmax(0)
        best = wanted.sort(descending=True, stable=True)
        assert [token for token, _ in event.top_logprobs] == best.indices[:5].tolist()
        assert [p for _, p in event.top_logprobs] == pytest.approx(best.values[:5].tolist())
        assert event.logprob == pytest.approx(float(wanted[event.token_id]))
        assert stored == event.top_logprobs
        tokens.append(event.token_id)
    assert ran.records[1].top_logprobs is None
    assert all(event.top_logprobs == () for event in ran.events[1])


def test_equal_logits_are_ordered_by_id() -> None:
    row = np.array([0.0, 2.0, 1.0, 2.0, 1.0], np.float32)
    assert [token for token, _ in most_likely(row, 3, token=1, logprob=-0.5)] == [1, 3, 2]
    assert [p for _, p in most_likely(row, 9, token=2, logprob=-1.5)] == [
        -0.5,
        -0.5,
        -1.5,
        -1.5,
        -2.5,
    ]


def test_a_nodes_path_has_its_drafts() -> None:
    trees = chain_trees([5, 6], np.array([[1, 2], [3, 4]], np.int32))
    assert [trees.path(1, slot) for slot in range(3)] == [[], [3], [3, 4]]


REFUSED: list[tuple[str, Any]] = [
    ("min_p", 1.5),
    ("min_p", float("nan")),
    ("min_p", "much"),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.5),
    ("repetition_penalty", 0),
    ("repetition_penalty", float("inf")),
    ("logit_bias", {1: 101}),
    ("logit_bias", {1: float("nan")}),
    ("logit_bias", {1: "much"}),
    ("logit_bias", {"one": 1}),
    ("logit_bias", ((1, 1.0), (1, 2.0))),
    ("logit_bias", dict.fromkeys(range(1025), 1)),
    ("logit_bias", 7),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_the_error_names_invalid_sampling(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("min_tokens", -1), ("min_tokens", 129), ("top_logprobs", 21), ("top_logprobs", 0.5)],
)
def test_the_error_names_invalid_numbers_of_tokens(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{name} is {value}"):
        GenerateParams(**{name: value})


def test_biases_are_of_the_vocabulary() -> None:
    params = GenerateParams(sampling=SamplingParams(logit_bias={VOCAB: 1.0}))
    with pytest.raises(RequestError, match=f"logit_bias names token {VOCAB}") as caught:
        toy_engine().generate([prompt([1])], params)
    assert caught.value.field == "logit_bias"


def test_drafts_by_raw_logits_are_rejected_if_a_bias_decides() -> None:
    params = GenerateParams(max_new_tokens=8, sampling=SamplingParams(logit_bias={9: 100.0}))
    ran = run(toy_engine(), PROMPTS[:1], params, drafter=TreeOfTokens(right, [-1, 0]))
    assert ran.ids == [[9] * 8]
    assert ran.records[0].stats.mean_acceptance_length == 1.0
