"""A draft changes nothing, at length: tokens, log-probabilities, hidden states, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
from dense_models import VOCAB, build_dense
from example_engine import CHAIN, TREE, build_example, on_gpu, records

from specbuild.runtime.draft.static_tree import StaticTree
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.plan import ProgramEntry
from specbuild.runtime.executors.cuda.executor import CudaExecutor
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams

PROMPTS, TOKENS = 100, 256
# A tree that a user gives, for steps with trees up to TREE.
FORM = StaticTree.of([-1, -1, -1, 0, 0, 1, 2, 3, 3, 7])
# Of the small dense models, one with plain norms and one with norms of queries and keys.
DENSE = ("llama, heads of 64", "qwen3, heads of 128")
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


@dataclass(frozen=True)
class Long:
    """An engine, and the prompts that it decodes at length."""

    engine: Engine
    prompts: list[Prompt]


@pytest.fixture(scope="module", params=["the example", *DENSE, "codes", f"codes: {DENSE[1]}"])
def long(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Long]:
    """The example model, or a small dense one, each with its draft; some with caches in fp8."""
    name = request.param.removeprefix("codes: ")
    asked = {"kv_dtype": "fp8"} if "codes" in request.param else {}
    if name in DENSE:
        _, output = build_dense(tmp_path_factory.mktemp("dense"), name, **asked)
        with on_gpu(output) as engine:
            yield Long(engine, random_prompts())
    elif asked:
        with on_gpu(build_example(tmp_path_factory.mktemp("codes") / "cuda", **asked)) as engine:
            yield Long(engine, beginnings(request.getfixturevalue("prompts")))
    else:
        engine = request.getfixturevalue("engine")
        yield Long(engine, beginnings(request.getfixturevalue("prompts")))


def beginnings(prompts: list[Prompt]) -> list[Prompt]:
    """The example's prompts, then beginnings of them."""
    random, found = np.random.default_rng(3), list(prompts)
    while len(found) < PROMPTS:
        source = prompts[len(found) % len(prompts)]
        assert source.prompt is not None
        text = source.prompt[: int(random.integers(8, len(source.prompt)))]
        found.append(Prompt(f"{source.id}, {len(text)} characters", None, text))
    return found


def random_prompts() -> list[Prompt]:
    """Random tokens of a small dense model, from a few to more than a chunk."""
    random = np.random.default_rng(4)
    lengths = random.integers(3, 200, PROMPTS)
    return [
        Prompt(str(i), tuple(random.integers(3, VOCAB, n).tolist())) for i, n in enumerate(lengths)
    ]


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["greedy", "sampled"])
def plain(request: pytest.FixtureRequest, long: Long) -> tuple[float, Decoded]:
    """A temperature, and what comes of it without a draft."""
    return request.param, decode(long.engine, long.prompts, request.param, None)


@pytest.mark.parametrize("shape", [CHAIN, TREE, FORM], ids=["chain", "tree", "fixed form"])
def test_a_draft_changes_no_bit_of_a_long_run(
    long: Long, plain: tuple[float, Decoded], shape: DraftShape
) -> None:
    temperature, wanted = plain
    got = decode(long.engine, long.prompts, temperature, shape)
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
