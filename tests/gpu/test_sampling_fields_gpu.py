"""What requests change of logits, likeliest tokens and guides: on a GPU, by the CPU's rules.

Every token of the GPU is held against the CPU engine's logits behind the same tokens, changed by
the host's own code. Two engines round differently: a token may be chosen whose score lies as little
below the best one as roundings explain.
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
# What each field asks for, beside the temperature.
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
    wanted: GenerateParams,
    engine: Engine,
) -> np.ndarray:
    """A row of the CPU's logits as the host changes it, behind prompt and output."""
    row = raw.copy()
    prompt, output = (np.array(part, np.int32) for part in ids)
    mask = None
    if wanted.guide is not None:
        mask = engine.compile(wanted.guide).begin().mask(output)
        assert mask is not None
    ends = engine.manifest.target.eos_token_ids
    adjust(row, wanted, prompt=prompt, output=output, eos_token_ids=ends, mask=mask)
    return row


def scores(row: np.ndarray, sampling: SamplingParams, position: int) -> np.ndarray:
    """What the choice is the largest of; −∞ where a token is dropped."""
    logits = torch.from_numpy(row)[None]
    if sampling.temperature == 0:
        return row
    scaled = logits / sampling.temperature
    limits = torch.tensor([sampling.top_k]), torch.tensor([sampling.top_p])
    noise = gumbel_noise(torch.tensor([sampling.noise_seed]), torch.tensor([position]), len(row))
    noisy = (scaled + noise).masked_fill(~kept_tokens(scaled, *limits), -torch.inf)
    return np.where(row <= REFUSED, -np.inf, noisy[0].numpy())


def check_tokens(cpu: Engine, wanted: GenerateParams, record: RunRecord) -> float:
    """Each token is the best by the CPU's rules, or nearly; the share that is the best."""
    sampling, prompt, output = wanted.sampling, record.prompt_ids, record.output_ids
    ids = [*prompt, *output]
    logits = np.concatenate([scored.logits for scored in cpu.decoder.score(ids[:-1])])
    near = NEAR_TIE / (sampling.temperature or 1)
    # Where a cut falls is as uncertain as a logit.
    looser = replace(
        sampling, min_p=sampling.min_p * exp(-near), top_p=min(1.0, sampling.top_p + 0.04)
    )
    loose = replace(wanted, sampling=looser)
    best = 0
    for i, token in enumerate(output):
        raw, at = logits[len(prompt) - 1 + i], len(prompt) - 1 + i
        behind = prompt, output[:i]
        strict = scores(changed(raw, behind, wanted, cpu), sampling, at)
        allowed = scores(changed(raw, behind, loose, cpu), looser, at)
        assert allowed[token] >= strict.max() - 2 * near, (i, token, int(strict.argmax()))
        best += int(token == strict.argmax())
        assert record.logprobs is not None
        wide = raw.astype(np.float64)
        expected = wide[token] - wide.max() - np.log(np.exp(wide - wide.max()).sum())
        # The logit and what all of them sum up to are as uncertain, each.
        assert abs(record.logprobs[i] - expected) < 2 * NEAR_TIE
    return best / len(output)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("field", FIELDS)
def test_tokens_are_those_of_the_cpus_rules_and_neighbours_keep_theirs(
    engine: Engine, cpu: Engine, prompts: list[Prompt], field: str, temperature: float
) -> None:
    wanted, plain = params(temperature, **FIELDS[field]), params(temperature)
    alone = records(engine, prompts[:3], plain, TREE)
    mixed = records(engine, prompts[:6], [plain] * 3 + [wanted] * 3, TREE)
    for ours, theirs in zip(mixed, alone, strict=False):
        assert ours.output_ids == theirs.output_ids
        # They share steps with full logits, whose log-probabilities another kernel adds up.
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
        assert ours.stats.acceptance_histogram == theirs.stats.acceptance_histogram
    shares = [check_tokens(cpu, wanted, record) for record in mixed[3:]]
    assert np.mean(shares) > 0.9
    assert sum(sum(record.stats.acceptance_histogram[1:]) for record in mixed[3:]) > 0
    if field != "min_p" or temperature:
        assert outputs(mixed[3:]) != outputs(records(engine, prompts[3:6], plain, None))
    # In other company, with another draft and without one, the same tokens; while a sequence is
    # in steps with full logits, the same bits.
    [other], [without] = (records(engine, prompts[3:4], wanted, s) for s in (CHAIN, None))
    assert other.output_ids == without.output_ids == mixed[3].output_ids
    np.testing.assert_allclose(other.logprobs, mixed[3].logprobs, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_ends_wait_for_min_tokens(
    engine: Engine, cpu: Engine, prompts: list[Prompt], temperature: float
) -> None:
    plain = replace(params(temperature), ignore_eos=False, max_new_tokens=TOKENS)
    [record] = records(engine, prompts[:1], plain, None)
    # The tokens of the first half end the output as soon as they may.
    stops = tuple(set(record.output_ids[: TOKENS // 2]))
    wanted = replace(plain, stop_token_ids=stops, min_tokens=12)
    mixed = records(engine, prompts[:2], [wanted, plain], CHAIN)
    ids, ends = mixed[0].output_ids, (*stops, *engine.manifest.target.eos_token_ids)
    assert len(ids) > 12 and not set(ids[:12]) & set(ends)
    assert check_tokens(cpu, wanted, mixed[0]) > 0.75
    short = replace(plain, stop_token_ids=stops)
    assert len(records(engine, prompts[:1], short, None)[0].output_ids) < 12


def test_likeliest_tokens(engine: Engine, cpu: Engine, prompts: list[Prompt]) -> None:
    each = [replace(params(0.0), top_logprobs=n) for n in (1, 5, 20, 0)]
    found = records(engine, prompts[:4], each, TREE)
    plain = records(engine, prompts[:4], params(0.0), TREE)
    assert [r.output_ids for r in found] == [r.output_ids for r in plain]
    for counted, alone in zip(found, plain, strict=True):
        assert counted.stats.acceptance_histogram == alone.stats.acceptance_histogram
        np.testing.assert_allclose(counted.logprobs, alone.logprobs, atol=1e-4)
    for record, wanted in zip(found[:3], each, strict=False):
        assert record.logprobs is not None and record.top_logprobs is not None
        ids = [*record.prompt_ids, *record.output_ids]
        logits = np.concatenate([scored.logits for scored in cpu.decoder.score(ids[:-1])])
        rows = logits[len(record.prompt_ids) - 1 :].astype(np.float64)
        rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
        for i, (row, top) in enumerate(zip(rows, record.top_logprobs, strict=True)):
            assert len(top) == wanted.top_logprobs
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
def test_guided_outputs_have_their_form(
    engine: Engine,
    cpu: Engine,
    prompts: list[Prompt],
    kind: str,
    temperature: float,
    shape: DraftShape | None,
) -> None:
    pytest.importorskip("llguidance")
    plain = params(temperature)
    wanted = replace(plain, guide=GUIDES[kind], ignore_eos=False, max_new_tokens=160)
    mixed = records(engine, prompts[:4], [wanted, plain, wanted, plain], shape)
    alone = records(engine, prompts[:4], plain, shape)
    for ours, theirs in zip(mixed[1::2], alone[1::2], strict=True):
        assert ours.output_ids == theirs.output_ids
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
    for record in mixed[::2]:
        check_tokens(cpu, wanted, record)
        if record.finish_reason == "length":
            # Nothing bounds the repetition of an expression.
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
    [alone_too] = records(engine, prompts[:1], wanted, None)
    assert alone_too.output_ids == mixed[0].output_ids
    # Which tokens masked steps choose depends on drafts; two kernels add up log-probabilities.
    np.testing.assert_allclose(alone_too.logprobs, mixed[0].logprobs, atol=1e-4)


def test_penalties_and_a_guide_together(engine: Engine, cpu: Engine, prompts: list[Prompt]) -> None:
    pytest.importorskip("llguidance")
    sampling = SamplingParams(0.8, seed=5, presence_penalty=0.6, logit_bias={7: 3.0}, min_p=0.05)
    wanted = GenerateParams(
        max_new_tokens=200, sampling=sampling, guide=GUIDES["schema"], top_logprobs=3
    )
    [record] = records(engine, prompts[:1], wanted, TREE)
    check_tokens(cpu, wanted, record)
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
    asked = [replace(prompts[i % len(prompts)], id=str(i)) for i in range(len(counts))]
    together = records(engine, asked, each, CHAIN)
    for record, prompt, wanted in zip(together, asked, each, strict=True):
        [alone] = records(engine, [prompt], wanted, None)
        assert alone.output_ids == record.output_ids
        np.testing.assert_allclose(alone.logprobs, record.logprobs, atol=1e-4)
