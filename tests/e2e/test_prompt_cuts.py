"""Chunk boundaries of a prompt and other sequences decide near ties only (CPU)."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from prompt_cuts import cut_at_random

from specbuild.runtime.engine import Engine
from specbuild.runtime.measure.losslessness import NEAR_TIE
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt

LENGTHS = (61, 7, 40)
PARAMS = GenerateParams(max_new_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tiny_engine: Path) -> Engine:
    return Engine.load(tiny_engine)


def prompts() -> list[Prompt]:
    rng = np.random.default_rng(8)
    return [Prompt(str(n), tuple(rng.integers(3, 250, n).tolist())) for n in LENGTHS]


def decode(engine: Engine, requests: list[Prompt]) -> list[RunRecord]:
    events = engine.generate(requests, PARAMS, speculation=None)
    ends = {e.request: e.record for e in events if isinstance(e, FinishEvent)}
    return [ends[i] for i in range(len(requests))]


def assert_same_up_to_a_near_tie(one: RunRecord, other: RunRecord) -> None:
    """Assert that log-probabilities are equal up to the first token that differs.

    Each run's token has the highest probability there: the difference is the gap between the two.
    """
    pairs = zip(one.output_ids, other.output_ids, strict=True)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), len(one.output_ids) - 1)
    assert one.logprobs and other.logprobs
    gaps = np.abs(np.subtract(one.logprobs, other.logprobs))[: first + 1]
    assert gaps.max() < NEAR_TIE, f"{gaps.max()} at token {gaps.argmax()}"


def test_ten_random_chunkings_and_batches_change_no_token(engine: Engine) -> None:
    whole = [decode(engine, [prompt])[0] for prompt in prompts()]
    places = set()
    for seed in range(10):
        with cut_at_random(seed, sum(LENGTHS)) as launched:
            alone = decode(engine, prompts()[:1])
            cut = len(launched)
            together = decode(engine, prompts())
        assert sum(launched[:cut]) == LENGTHS[0] and sum(launched[cut:]) == sum(LENGTHS)
        places |= set(accumulate(launched[: cut - 1]))
        for record, expected in zip([*alone, *together], [whole[0], *whole], strict=True):
            assert_same_up_to_a_near_tie(record, expected)
    assert len(places) > 15
