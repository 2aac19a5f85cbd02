"""Logit changes, top log-probabilities and guides of requests: on a GPU, by the CPU's rules.

Every token of the GPU is compared with the CPU engine's logits after the same tokens, changed by
the host's own code. Both engines round differently, so a selected token may have a score below the
best by the error of rounding.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from math import exp

import numpy as np
import pytest
import torch
from example_engine import CHAIN, EXAMPLE, TREE, outputs, records
from test_engine_gpu import NEAR_TIE

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.plugins_cuda.choose.op import gumbel_noise, kept_tokens
from specbuild.runtime.decode.logit_rows import adjust
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.guides.grammar import REFUSED
from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams

TOKENS = 40
NONE = np.zeros(0, np.int32)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["red", "green"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
# The parameters of each field, except the temperature.
FIELDS: dict[str, dict[str, object]] = {
    "min_p": {"min_p": 0.2},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 0.8},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "logit_bias": {"logit_bias": {11: 4.0, 25: -100.0, 300: 2.5}},
    "all": {
        "min_p": 0.1,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "logit_bias": {11: 2.0},
        "top_p": 0.95,
    },
}


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    output = tmp_path_factory.mktemp("example") / "cpu"
    limits = LimitOptions(max_seq_len=1024)
    build(BuildOptions(model=EXAMPLE / "target", output=output, limits=limits), SilentProgress())
    return Engine.load(output)


def params(temperature: float, **fields: object) -> GenerateParams:
    sampling = SamplingParams(temperature, seed=11, **fields)
    return GenerateParams(max_new_tokens=TOKENS, sampling=sampling, ignore_eos=True)


def changed(
    raw: np.ndarray,
    ids: tuple[Sequence[int], Sequence[int]],
    expected: GenerateParams,
    engine: Engine,
) -> np.ndarray:
    """Return a row of the CPU's logits as the host changes it, after prompt and output."""
    row = raw.copy()
    prompt, output = (np.array(part, np.int32) for part in ids)
    mask = None
    if expected.guide is not None:
        mask = engine.compile(expected.guide).begin().mask(output)
        assert mask is not None
    ends = engine.manifest.target.eos_token_ids
    adjust(row, expected, prompt=prompt, output=output, eos_token_ids=ends, mask=mask)
    return row


def scores(row: np.ndarray, sampling: SamplingParams, position: int) -> np.ndarray:
    """Return the scores whose largest is selected; −∞ for a dropped token."""
    logits = torch.from_numpy(row)[None]
    if sampling.temperature == 0:
        return row
    scaled = logits / sampling.temperature
    limits = torch.tensor([sampling.top_k]), torch.tensor([sampling.top_p])
    noise = gumbel_noise(torch.tensor([sampling.noise_seed]), torch.tensor([position]), len(row))
    noisy = (scaled + noise).masked_fill(~kept_tokens(scaled, *limits), -torch.inf)
    return np.where(row <= REFUSED, -np.inf, noisy[0].numpy())


def check_tokens(cpu: Engine, reference: GenerateParams, record: RunRecord) -> float:
    """Assert that each token is the best by the CPU's rules, or nearly.

    Return the share of best ones.
    """
    sampling, prompt, output = reference.sampling, record.prompt_ids, record.output_ids
    ids = [*prompt, *output]
    logits = np.concatenate([scored.logits for scored in cpu.decoder.score(ids[:-1])])
    near = NEAR_TIE / (sampling.temperature or 1)
    # The boundary of a cut is as uncertain as a logit.
    looser = replace(
        sampling, min_p=sampling.min_p * exp(-near), top_p=min(1.0, sampling.top_p + 0.04)
    )
    loose = replace(reference, sampling=looser)
    best = 0
    for i, token in enumerate(output):
        raw, at = logits[len(prompt) - 1 + i], len(prompt) - 1 + i
        behind = prompt, output[:i]
        strict = scores(changed(raw, behind, reference, cpu), sampling, at)
        allowed = scores(changed(raw, behind, loose, cpu), looser, at)
        assert allowed[token] >= strict.max() - 2 * near, (i, token, int(strict.argmax()))
        best += int(token == strict.argmax())
        assert record.logprobs is not None
        wide = raw.astype(np.float64)
        expected = wide[token] - wide.max() - np.log(np.exp(wide - wide.max()).sum())
        # Both the logit and the sum of all exponentials are uncertain by that much.
        assert abs(record.logprobs[i] - expected) < 2 * NEAR_TIE
    return best / len(output)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("field", FIELDS)
def test_tokens_follow_the_rules_of_the_cpu_and_others_do_not_change(
    engine: Engine, cpu: Engine, prompts: list[Prompt], field: str, temperature: float
) -> None:
    expected, plain = params(temperature, **FIELDS[field]), params(temperature)
    alone = records(engine, prompts[:3], plain, TREE)
    mixed = records(engine, prompts[:6], [plain] * 3 + [expected] * 3, TREE)
    for actual, desired in zip(mixed, alone, strict=False):
        assert actual.output_ids == desired.output_ids
        # They share steps with full logits, whose log-probabilities another kernel computes.
        np.testing.assert_allclose(actual.logprobs, desired.logprobs, atol=1e-4)
        assert actual.stats.acceptance_histogram == desired.stats.acceptance_histogram
    shares = [check_tokens(cpu, expected, record) for record in mixed[3:]]
    assert np.mean(shares) > 0.9
    assert sum(sum(record.stats.acceptance_histogram[1:]) for record in mixed[3:]) > 0
    if field != "min_p" or temperature:
        assert outputs(mixed[3:]) != outputs(records(engine, prompts[3:6], plain, None))
    # In other batches, with another draft and without one, tokens are equal; in steps with full
    # logits, bits are equal too.
    [other], [without] = (records(engine, prompts[3:4], expected, s) for s in (CHAIN, None))
    assert other.output_ids == without.output_ids == mixed[3].output_ids
    np.testing.assert_allclose(other.logprobs, mixed[3].logprobs, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_min_tokens_delays_the_end(
    engine: Engine, cpu: Engine, prompts: list[Prompt], temperature: float
) -> None:
    plain = replace(params(temperature), ignore_eos=False, max_new_tokens=TOKENS)
    [record] = records(engine, prompts[:1], plain, None)
    # The tokens of the first half end the output as soon as that is allowed.
    stops = tuple(set(record.output_ids[: TOKENS // 2]))
    expected = replace(plain, stop_token_ids=stops, min_tokens=12)
    mixed = records(engine, prompts[:2], [expected, plain], CHAIN)
    ids, ends = mixed[0].output_ids, (*stops, *engine.manifest.target.eos_token_ids)
    assert len(ids) > 12 and not set(ids[:12]) & set(ends)
    assert check_tokens(cpu, expected, mixed[0]) > 0.75
    short = replace(plain, stop_token_ids=stops)
    assert len(records(engine, prompts[:1], short, None)[0].output_ids) < 12


def test_top_log_probabilities(engine: Engine, cpu: Engine, prompts: list[Prompt]) -> None:
    each = [replace(params(0.0), top_logprobs=n) for n in (1, 5, 20, 0)]
    result = records(engine, prompts[:4], each, TREE)
    plain = records(engine, prompts[:4], params(0.0), TREE)
    assert [r.output_ids for r in result] == [r.output_ids for r in plain]
    for counted, alone in zip(result, plain, strict=True):
        assert counted.stats.acceptance_histogram == alone.stats.acceptance_histogram
        np.testing.assert_allclose(counted.logprobs, alone.logprobs, atol=1e-4)
    for record, expected in zip(result[:3], each, strict=False):
        assert record.logprobs is not None and record.top_logprobs is not None
        ids = [*record.prompt_ids, *record.output_ids]
        logits = np.concatenate([scored.logits for scored in cpu.decoder.score(ids[:-1])])
        rows = logits[len(record.prompt_ids) - 1 :].astype(np.float64)
        rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
        for i, (row, top) in enumerate(zip(rows, record.top_logprobs, strict=True)):
            assert len(top) == expected.top_logprobs
            values = [value for _, value in top]
            assert values == sorted(values, reverse=True)
            assert top[0][0] == record.output_ids[i]
            assert values[0] == pytest.approx(record.logprobs[i], abs=1e-5)
            assert len({token for token, _ in top}) == len(top)
            wide = [row[token] for token, _ in top]
            assert np.abs(np.array(wide) - values).max() < NEAR_TIE
            left_out = np.delete(row, [token for token, _ in top]).max()
            assert left_out < values[-1] + NEAR_TIE


GUIDES = {
    "schema": Guide.json(SCHEMA),
    "regex": Guide.regex("(ab|cd)+[0-9]{3}"),
    "choice": Guide.choice(["yes", "no", "perhaps not"]),
}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", GUIDES)
@pytest.mark.parametrize("shape", [None, TREE], ids=["plain", "tree"])
def test_guided_outputs_match_their_guides(
    engine: Engine,
    cpu: Engine,
    prompts: list[Prompt],
    kind: str,
    temperature: float,
    shape: DraftShape | None,
) -> None:
    pytest.importorskip("llguidance")
    plain = params(temperature)
    expected = replace(plain, guide=GUIDES[kind], ignore_eos=False, max_new_tokens=160)
    mixed = records(engine, prompts[:4], [expected, plain, expected, plain], shape)
    alone = records(engine, prompts[:4], plain, shape)
    for actual, desired in zip(mixed[1::2], alone[1::2], strict=True):
        assert actual.output_ids == desired.output_ids
        np.testing.assert_allclose(actual.logprobs, desired.logprobs, atol=1e-4)
    for record in mixed[::2]:
        check_tokens(cpu, expected, record)
        if record.finish_reason == "length":
            # The repetitions of an expression are unbounded.
            assert kind == "regex"
            continue
        assert record.text is not None
        if kind == "schema":
            value = json.loads(record.text)
            assert set(value) == set(SCHEMA["required"]) and value["kind"] in ("red", "green")
            assert 0 <= value["count"] <= 999 and len(value["name"]) <= 8
        elif kind == "regex":
            assert re.fullmatch("(ab|cd)+[0-9]{3}", record.text)
        else:
            assert record.text in ("yes", "no", "perhaps not")
    [alone_too] = records(engine, prompts[:1], expected, None)
    assert alone_too.output_ids == mixed[0].output_ids
    # The tokens of masked steps depend on drafts; two kernels compute log-probabilities.
    np.testing.assert_allclose(alone_too.logprobs, mixed[0].logprobs, atol=1e-4)


def test_penalties_and_a_guide_together(engine: Engine, cpu: Engine, prompts: list[Prompt]) -> None:
    pytest.importorskip("llguidance")
    sampling = SamplingParams(0.8, seed=5, presence_penalty=0.6, logit_bias={7: 3.0}, min_p=0.05)
    parameters = GenerateParams(
        max_new_tokens=200, sampling=sampling, guide=GUIDES["schema"], top_logprobs=3
    )
    [record] = records(engine, prompts[:1], parameters, TREE)
    check_tokens(cpu, parameters, record)
    assert record.text is not None and set(json.loads(record.text)) == set(SCHEMA["required"])


def test_rows_move_while_steps_are_in_flight(engine: Engine, prompts: list[Prompt]) -> None:
    kinds = [
        params(0.0),
        params(0.8, frequency_penalty=0.8, repetition_penalty=1.2),
        params(0.8, logit_bias={11: 3.0}),
        params(0.8, min_p=0.2),
    ]
    counts = [9, 31, 5, 17, 40, 3, 23, 12, 28, 7, 15, 36]
    each = [replace(kinds[i % 4], max_new_tokens=n) for i, n in enumerate(counts)]
    requests = [replace(prompts[i % len(prompts)], id=str(i)) for i in range(len(counts))]
    together = records(engine, requests, each, CHAIN)
    for record, prompt, expected in zip(together, requests, each, strict=True):
        [alone] = records(engine, [prompt], expected, None)
        assert alone.output_ids == record.output_ids
        np.testing.assert_allclose(alone.logprobs, record.logprobs, atol=1e-4)
