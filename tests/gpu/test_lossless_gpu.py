"""A draft changes nothing, at length: tokens, log-probabilities, hidden states, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
from example_engine import CHAIN, TREE, records

from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.plan import ProgramEntry
from specbuild.runtime.executors.cuda.executor import CudaExecutor
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams

PROMPTS, TOKENS = 100, 256
# By the sequence's seed and the position: the target's tapped hidden states, as bytes.
States = dict[tuple[int, int], bytes]


@dataclass(frozen=True)
class Decoded:
    """All that a run gave."""

    records: list[RunRecord]
    states: States


def decode(
    engine: Engine, prompts: list[Prompt], temperature: float, shape: DraftShape | None
) -> Decoded:
    """Every prompt with a seed of its own."""
    wanted = [
        GenerateParams(
            max_new_tokens=TOKENS,
            sampling=SamplingParams(temperature=temperature, seed=seed),
            ignore_eos=True,
        )
        for seed in range(len(prompts))
    ]
    assert isinstance(engine.executor, CudaExecutor)
    with kept_states(engine.executor) as states:
        found = records(engine, prompts, wanted, shape)
    return Decoded(found, states)


@contextmanager
def kept_states(executor: CudaExecutor) -> Iterator[States]:
    """The rows that each step leaves for the draft: the target's at all tokens it committed."""
    kept: States = {}
    start = executor.start
    names = ("seed", "length", "pending_count", "pending_captured")

    def start_and_keep(entry: ProgramEntry, *rest: int) -> None:
        start(entry, *rest)
        if entry.kind != "step":
            return
        ports = [executor.read(name, rows=entry.batch) for name in names]
        for seed, length, count, rows in zip(*ports, strict=True):
            # An empty row has length 0; the newest row is that of the last committed token.
            for back in range(min(int(count), int(length))):
                place = (int(seed), int(length) - 1 - back)
                state = rows[int(count) - 1 - back].tobytes()
                assert kept.setdefault(place, state) == state, f"{place} changed"

    executor.start = start_and_keep  # type: ignore[method-assign]
    try:
        yield kept
    finally:
        executor.start = start  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def many(prompts: list[Prompt]) -> list[Prompt]:
    """The example's prompts, then beginnings of them."""
    random, found = np.random.default_rng(3), list(prompts)
    while len(found) < PROMPTS:
        source = prompts[len(found) % len(prompts)]
        assert source.prompt is not None
        text = source.prompt[: int(random.integers(8, len(source.prompt)))]
        found.append(Prompt(f"{source.id}, {len(text)} characters", None, text))
    return found


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["greedy", "sampled"])
def plain(
    request: pytest.FixtureRequest, engine: Engine, many: list[Prompt]
) -> tuple[float, Decoded]:
    """A temperature, and what comes of it without a draft."""
    return request.param, decode(engine, many, request.param, None)


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_draft_changes_no_bit_of_a_long_run(
    engine: Engine, many: list[Prompt], plain: tuple[float, Decoded], shape: DraftShape
) -> None:
    temperature, wanted = plain
    got = decode(engine, many, temperature, shape)
    for a, b in zip(wanted.records, got.records, strict=True):
        assert len(b.output_ids) == TOKENS
        assert a.output_ids == b.output_ids
        assert a.logprobs == b.logprobs
    # The last token is emitted and not run; the prompt's last row is not a step's.
    assert len(got.states) == PROMPTS * (TOKENS - 1)
    different = [place for place, state in got.states.items() if wanted.states[place] != state]
    assert not different, f"{len(different)} of {len(got.states)}, first at {min(different)}"
    assert len(set(got.states.values())) > len(got.states) // 2
    accepted = sum(sum(r.stats.acceptance_histogram[1:]) for r in got.records)
    assert accepted > PROMPTS
