"""Allowed tokens, bad words and reasoning budgets: by definition, with any draft.

The reference for bad words is transformers' logit processor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serve.served import LETTERS, NAME, TEMPLATE, served, toy_codec, worded
from toy_device import toy_cuda
from toy_engine import prompt, run, toy_engine
from toy_language import Language, guided_engine
from toy_model import EOS, VOCAB, choose, target_logits
from toy_plan import SHAPES
from transformers import NoBadWordsLogitsProcessor

from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.engine import Engine
from specbuild.runtime.errors import RequestError
from specbuild.runtime.guides.reasoning_budget import ReasoningBudget
from specbuild.runtime.request import FinishEvent, GenerateParams
from specbuild.runtime.sampling import SamplingParams

IDS = [1, 2, 3, 2, 9]
LENGTH = 24


def decode(params: GenerateParams, refused: Any) -> list[int]:
    """Decode without a draft, with the tokens of ``refused(output)`` masked."""
    tokens = list(IDS)
    for _ in range(params.max_new_tokens):
        logits = np.array(target_logits(tokens), np.float32)
        logits[list(refused(tokens[len(IDS) :]))] = -np.inf
        tokens.append(choose(logits, params.sampling, len(tokens) - 1)[0])
        if tokens[-1] == EOS and not params.ignore_eos:
            break
    return tokens[len(IDS) :]


def refused_by_bad_words(words: list[list[int]]) -> Any:
    processor = NoBadWordsLogitsProcessor(words)

    def refused(output: list[int]) -> list[int]:
        scores = processor(torch.tensor([output], dtype=torch.long), torch.zeros(1, VOCAB))
        return [int(i) for i in torch.nonzero(scores[0] == -torch.inf)]

    return refused


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("shape", [None, *SHAPES])
def test_bad_words_are_not_written(temperature: float, shape: Any) -> None:
    plain = GenerateParams(LENGTH, SamplingParams(temperature, seed=3), ignore_eos=True, raw=True)
    output = run(worded(), [IDS], plain, speculation=None).ids[0]
    pairs = [output[2:4], output[7:10], [output[0]]]
    pairs = [ids for ids in pairs if max(ids) < len(LETTERS)]
    params = replace(plain, bad_words=tuple("".join(LETTERS[i] for i in ids) for ids in pairs))
    expected = decode(params, refused_by_bad_words(pairs))
    assert expected != output
    assert run(worded(), [IDS], params, speculation=shape).ids[0] == expected
    device = toy_cuda(text=toy_codec()).engine
    events = device.generate(prompt(IDS), params, speculation=shape or SHAPES[0])
    assert [e.token_id for e in events if not isinstance(e, FinishEvent)] == expected


@settings(max_examples=10, deadline=None)
@given(
    st.sets(st.integers(0, VOCAB - 1), min_size=2, max_size=9),
    st.sampled_from([0.0, 0.8]),
    st.sampled_from([None, *SHAPES]),
)
def test_only_allowed_tokens_are_written(allowed: set[int], temperature: float, shape: Any) -> None:
    sampling = SamplingParams(temperature, seed=5, allowed_token_ids=tuple(allowed))
    params = GenerateParams(LENGTH, sampling)
    refused = set(range(VOCAB)) - allowed
    expected = decode(params, lambda _output: refused)
    assert set(expected) <= allowed
    assert run(toy_engine(), [IDS], params, speculation=shape).ids[0] == expected


def test_a_device_writes_only_allowed_tokens() -> None:
    sampling = SamplingParams(0.8, seed=5, allowed_token_ids=(4, 9, 17, 6), logit_bias={4: -3})
    params = GenerateParams(LENGTH, sampling)
    expected = run(toy_engine(), [IDS], params, speculation=None).ids[0]
    events = toy_cuda().engine.generate(prompt(IDS), params, speculation=SHAPES[0])
    assert [e.token_id for e in events if not isinstance(e, FinishEvent)] == expected
    assert set(expected) <= {4, 9, 17, 6}


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("start", [(7,), (7, 8)])
@pytest.mark.parametrize("shape", [None, *SHAPES])
@pytest.mark.parametrize("is_open", [False, True])
def test_reasoning_ends_when_its_budget_is_used(
    tokens: int, start: tuple[int, ...], shape: Any, is_open: bool
) -> None:
    end = 11
    budget = ReasoningBudget(tokens, start, end, is_open)
    # The start is likely, so reasoning begins again and again.
    sampling = SamplingParams(0.9, seed=8)
    params = GenerateParams(40, sampling, ignore_eos=True, reasoning_budget=budget)

    def refused(output: list[int]) -> set[int]:
        inside, used = is_open, 0
        for i, token in enumerate(output):
            if inside and token == end:
                inside = False
            elif inside:
                used += 1
            elif tuple(output[max(0, i + 1 - len(start)) : i + 1]) == start:
                inside = True
        if inside:
            return set(range(VOCAB)) - {end} if used >= tokens else set()
        before = tuple(output[len(output) - len(start) + 1 :]) if len(start) > 1 else ()
        return {start[-1]} if used >= tokens and before == start[:-1] else set()

    expected = decode(params, refused)
    assert not is_open or end in expected[: tokens + 1]
    assert run(toy_engine(), [IDS], params, speculation=shape).ids[0] == expected


def test_token_rules_apply_within_a_guide() -> None:
    """A guide of letters, without one of them."""
    ends = Language(({1: 0, 2: 0, 3: 0, 4: 0},), frozenset({0}))
    sampling = SamplingParams(0.8, seed=2, logit_bias={EOS: -100})
    plain = GenerateParams(LENGTH, sampling, guide=ends.guide, raw=True, detokenize=False)
    for bad in (1, 2, 3, 4):
        params = replace(plain, bad_words=(LETTERS[bad],))
        ids = run(ruled_engine(), [IDS], params, speculation=None).ids[0]
        assert len(ids) == LENGTH
        assert set(ids) == {1, 2, 3, 4} - {bad}
        assert run(ruled_engine(), [IDS], params, speculation=SHAPES[1]).ids[0] == ids


def ruled_engine() -> Engine:
    """Return an engine with guides, whose tokenizer has the toy's letters."""
    engine = guided_engine()
    engine.text = toy_codec()
    return engine


def test_a_rule_that_leaves_no_token_ends_the_output() -> None:
    guide = Language(({1: 1}, {2: 2}, {2: 3}, {}), frozenset({3})).guide
    params = GenerateParams(LENGTH, guide=guide, bad_words=("cc",), raw=True)
    (record,) = run(ruled_engine(), [IDS], params, speculation=None).records
    assert (record.output_ids[:2], record.finish_reason) == ((1, 2), "guide_failed")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bad_words": ("",)}, "bad_words is"),
        ({"bad_words": "b"}, "bad_words is"),
        ({"allowed_token_ids": ("b",)}, "allowed_token_ids"),
        ({"allowed_token_ids": 7}, "allowed_token_ids"),
        ({"allowed_token_ids": (VOCAB,)}, "allowed_token_ids names token"),
        ({"bad_words": ("b",) * 300}, "bad_words has 300 texts"),
    ],
)
def test_rejects_invalid_combinations(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        worded().check_prompts("bcd", GenerateParams(**fields))


def test_bad_words_need_a_tokenizer() -> None:
    with pytest.raises(RequestError, match="tokenizer"):
        toy_engine().check_prompts(prompt(IDS), GenerateParams(bad_words=("b",)))


def test_the_fields_of_requests() -> None:
    """Over HTTP, with a draft."""
    with served(worded(TEMPLATE), parser="harmony", setting=DraftSetting(SHAPES[1])) as (url, _):

        def text(path: str, **fields: Any) -> Any:
            body = {"model": NAME, "max_tokens": 24, "ignore_eos": True} | fields
            answer = httpx.post(url + path, json=body, timeout=300)
            assert answer.status_code == 200, answer.text
            return answer.json()

        completed = text("/v1/completions", prompt="bcd", allowed_token_ids=[1, 2])
        assert set(completed["choices"][0]["text"]) <= {"b", "c"}
        completed = text("/v1/completions", prompt="bcd", allowed_token_ids=[1, 2], bad_words=["c"])
        assert completed["choices"][0]["text"] == "b" * 24
        hello = [{"role": "user", "content": "bcd"}]
        chat = text(
            "/v1/chat/completions", messages=hello, thinking_token_budget=3, return_token_ids=True
        )
        assert chat["choices"][0]["finish_reason"] in ("length", "stop", "tool_calls")
        error = httpx.post(
            url + "/v1/completions",
            json={"model": NAME, "prompt": "bcd", "thinking_token_budget": 3},
        )
        assert error.json()["error"]["param"] == "thinking_token_budget"
