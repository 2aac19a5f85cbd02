"""Long runs with a draft: tokens, log-probabilities and hidden states do not change by a bit."""

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
# A tree that a user specifies, for steps with trees of up to TREE.
FORM = StaticTree.of([-1, -1, -1, 0, 0, 1, 2, 3, 3, 7])
# Two of the small dense models: with plain norms, and with norms of queries and keys.
DENSE = ("llama, heads of 64", "qwen3, heads of 128")
# For each seed and position, the target's captured hidden states, as bytes.
States = dict[tuple[int, int], bytes]


@dataclass(frozen=True)
class Decoded:
    """All results of a run."""

    records: list[RunRecord]
    states: States


def decode(
    engine: Engine, prompts: list[Prompt], temperature: float, shape: DraftShape | None
) -> Decoded:
    """Generate for every prompt, each with another seed."""
    expected = [
        GenerateParams(
            max_new_tokens=TOKENS,
            sampling=SamplingParams(temperature=temperature, seed=seed),
            ignore_eos=True,
        )
        for seed in range(len(prompts))
    ]
    assert isinstance(engine.executor, CudaExecutor)
    with kept_states(engine.executor) as states:
        result = records(engine, prompts, expected, shape)
    return Decoded(result, states)


@contextmanager
def kept_states(executor: CudaExecutor) -> Iterator[States]:
    """Record the rows that each step leaves for the draft, for all committed tokens."""
    states: States = {}
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
                assert states.setdefault(place, state) == state, f"{place} changed"

    executor.start = start_and_keep  # type: ignore[method-assign]
    try:
        yield states
    finally:
        executor.start = start  # type: ignore[method-assign]


@dataclass(frozen=True)
class Long:
    """An engine, and the prompts of a long run."""

    engine: Engine
    prompts: list[Prompt]


@pytest.fixture(scope="module", params=["the example", *DENSE, "codes", f"codes: {DENSE[1]}"])
def long(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Long]:
    """The example model or a small dense one, each with its draft; some with fp8 caches."""
    name = request.param.removeprefix("codes: ")
    options = {"kv_dtype": "fp8"} if "codes" in request.param else {}
    if name in DENSE:
        _, output = build_dense(tmp_path_factory.mktemp("dense"), name, **options)
        with on_gpu(output) as engine:
            yield Long(engine, random_prompts())
    elif options:
        with on_gpu(build_example(tmp_path_factory.mktemp("codes") / "cuda", **options)) as engine:
            yield Long(engine, beginnings(request.getfixturevalue("prompts")))
    else:
        engine = request.getfixturevalue("engine")
        yield Long(engine, beginnings(request.getfixturevalue("prompts")))


def beginnings(prompts: list[Prompt]) -> list[Prompt]:
    """Return the example's prompts, then prefixes of them."""
    random, result = np.random.default_rng(3), list(prompts)
    while len(result) < PROMPTS:
        source = prompts[len(result) % len(prompts)]
        assert source.prompt is not None
        text = source.prompt[: int(random.integers(8, len(source.prompt)))]
        result.append(Prompt(f"{source.id}, {len(text)} characters", None, text))
    return result


def random_prompts() -> list[Prompt]:
    """Return random tokens of a small dense model, from a few to more than a chunk."""
    random = np.random.default_rng(4)
    lengths = random.integers(3, 200, PROMPTS)
    return [
        Prompt(str(i), tuple(random.integers(3, VOCAB, n).tolist())) for i, n in enumerate(lengths)
    ]


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["greedy", "sampled"])
def plain(request: pytest.FixtureRequest, long: Long) -> tuple[float, Decoded]:
    """A temperature, and the results without a draft."""
    return request.param, decode(long.engine, long.prompts, request.param, None)


@pytest.mark.parametrize("shape", [CHAIN, TREE, FORM], ids=["chain", "tree", "fixed form"])
def test_a_draft_changes_no_bit_of_a_long_run(
    long: Long, plain: tuple[float, Decoded], shape: DraftShape
) -> None:
    temperature, expected = plain
    result = decode(long.engine, long.prompts, temperature, shape)
    for a, b in zip(expected.records, result.records, strict=True):
        assert len(b.output_ids) == TOKENS
        assert a.output_ids == b.output_ids
        assert a.logprobs == b.logprobs
    # The last token is emitted but not processed; the prompt's last row belongs to no step.
    assert len(result.states) == PROMPTS * (TOKENS - 1)
    different = [place for place, state in result.states.items() if expected.states[place] != state]
    assert not different, f"{len(different)} of {len(result.states)}, first at {min(different)}"
    assert len(set(result.states.values())) > len(result.states) // 2
    accepted = sum(sum(r.stats.acceptance_histogram[1:]) for r in result.records)
    assert accepted > PROMPTS
