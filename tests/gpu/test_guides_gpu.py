"""Guided outputs whose tokens are checked on arrival, against masked decoding on a GPU.

The reference does not check tokens: every step is masked and has one row. Tokens are therefore
compared bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from example_engine import CHAIN, EXAMPLE, TREE, on_gpu, records
from test_sampling_fields_gpu import GUIDES

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.executors.cuda.executor import CudaExecutor
from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams

pytest.importorskip("llguidance")

SHAPES = {"plain": None, "chain": CHAIN, "tree": TREE}
FORMS = {
    **GUIDES,
    # Any text of this length: hardly any token is rejected.
    "texts": Guide.json(
        {
            "type": "object",
            "properties": {name: {"type": "string", "maxLength": 120} for name in ("a", "b")},
            "required": ["a", "b"],
            "additionalProperties": False,
        }
    ),
}


def params(temperature: float, guide: Guide | None = None, **changes: object) -> GenerateParams:
    sampling = SamplingParams(temperature, seed=11)
    return GenerateParams(max_new_tokens=160, sampling=sampling, guide=guide, **changes)


def masked(engine: Engine, prompts: list[Prompt], expected: GenerateParams) -> list[RunRecord]:
    """Return each request's record alone, with every step masked."""
    with patch.object(GenerateParams, "checks_guide", new=False):
        before = steps_of(engine)
        result = [records(engine, [prompt], expected, None)[0] for prompt in prompts]
        assert not (steps_of(engine) - before)["shared"]
    return result


def steps_of(engine: Engine) -> Counter[str]:
    """Return how many masked and unmasked step programs were queued."""
    assert isinstance(engine.executor, CudaExecutor)
    counts: Counter[str] = Counter()
    for name, count in engine.executor.launched.items():
        if name.startswith("step"):
            counts["masked" if "adjusted" in name else "shared"] += count
    return counts


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_tokens_equal_masked_decoding(
    engine: Engine, prompts: list[Prompt], form: str, shape: str, temperature: float
) -> None:
    reference = params(temperature, FORMS[form])
    expected = masked(engine, prompts[:4], reference)
    before = steps_of(engine)
    alone = [records(engine, [prompt], reference, SHAPES[shape])[0] for prompt in prompts[:4]]
    ran = steps_of(engine) - before
    together = records(engine, prompts[:4], reference, SHAPES[shape])
    for result in (alone, together):
        assert [r.output_ids for r in result] == [r.output_ids for r in expected]
        assert [r.finish_reason for r in result] == [r.finish_reason for r in expected]
        for actual, desired in zip(result, expected, strict=True):
            np.testing.assert_allclose(actual.logprobs, desired.logprobs, atol=1e-4)
    tokens = sum(len(r.output_ids) - 1 for r in alone)
    chosen = sum(r.stats.masked_tokens or 0 for r in alone)
    assert ran["masked"] == 0 and chosen <= tokens
    print(
        f"{form} {shape} t={temperature}: {tokens} tokens, {chosen} masked, {ran['shared']} steps"
    )


@pytest.fixture(scope="module")
def undrafted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The example's target alone: its steps verify forced tokens only."""
    output = tmp_path_factory.mktemp("undrafted") / "engine"
    options = BuildOptions.from_flat(
        model=EXAMPLE / "target", output=output, backend="cuda", max_seq_len=1024, max_batch_size=8
    )
    build(options, SilentProgress())
    with on_gpu(output) as engine:
        yield engine


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("form", ["schema", "texts"])
def test_guides_force_chains_without_a_drafter(
    undrafted: Engine, prompts: list[Prompt], form: str, temperature: float
) -> None:
    """Tokens and log-probabilities equal masked decoding, alone and in a batch."""
    reference = params(temperature, FORMS[form])
    expected = masked(undrafted, prompts[:4], reference)
    assert isinstance(undrafted.executor, CudaExecutor)
    before = Counter(undrafted.executor.launched)
    alone = [records(undrafted, [prompt], reference)[0] for prompt in prompts[:4]]
    together = records(undrafted, prompts[:4], reference)
    for result in (alone, together):
        assert [r.output_ids for r in result] == [r.output_ids for r in expected]
        for actual, desired in zip(result, expected, strict=True):
            np.testing.assert_allclose(actual.logprobs, desired.logprobs, atol=1e-4)
    chains = sum(n for name, n in (undrafted.executor.launched - before).items() if "offer" in name)
    steps, tokens = (sum(of(r) for r in alone) for of in (_steps, _tokens))
    print(f"{form} t={temperature}: {tokens} tokens in {steps} steps, {chains} with chains")
    assert chains
    if form == "schema":
        assert steps < 0.9 * tokens


def _steps(record: RunRecord) -> int:
    return record.stats.steps


def _tokens(record: RunRecord) -> int:
    return len(record.output_ids)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("shape", SHAPES)
def test_other_sequences_in_a_batch_change_nothing(
    engine: Engine, prompts: list[Prompt], shape: str, temperature: float
) -> None:
    """Guided, free and penalized sequences join and leave each other's steps."""
    draft: DraftShape | None = SHAPES[shape]
    kinds = [
        params(temperature, FORMS["schema"]),
        params(temperature, ignore_eos=True),
        params(temperature, FORMS["texts"]),
        replace(
            params(temperature, ignore_eos=True),
            sampling=SamplingParams(temperature, seed=3, presence_penalty=0.6),
        ),
    ]
    counts = [160, 31, 90, 17, 44, 60, 160, 12, 28, 7, 120, 36]
    each = [replace(kinds[i % 4], max_new_tokens=n) for i, n in enumerate(counts)]
    requests = [replace(prompts[i % len(prompts)], id=str(i)) for i in range(len(counts))]
    mixed = records(engine, requests, each, draft)
    for record, prompt, expected in zip(mixed, requests, each, strict=True):
        if expected.guide is None:
            [alone] = records(engine, [prompt], expected, draft)
            assert record.output_ids == alone.output_ids
            # Steps with and without full logits compute log-probabilities in different kernels.
            np.testing.assert_allclose(record.logprobs, alone.logprobs, atol=1e-4)
        else:
            assert record.output_ids == masked(engine, [prompt], expected)[0].output_ids
