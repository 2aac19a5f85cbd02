"""The plugins and the executor of the TensorRT backend on a GPU, without TensorRT.

Its engines are the plugin graphs, run node by node: with the same records, launches, profiles,
pools, CUDA graphs and decoding loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from shutil import copy, copytree
from time import perf_counter

import numpy as np
import pytest
from example_engine import CHAIN, EXAMPLE, TREE, records
from plugin_walk import build_walked, load_walked

from specbuild.builder.engine.backend_sizes import MAX_DECODE_ROWS
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.executors.tensorrt.executor import TensorRtExecutor
from specbuild.runtime.request import GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams

TOKENS = 96
FORCED = 24


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    directory = tmp_path_factory.mktemp("walked") / "engine"
    started_s = perf_counter()
    build_walked(directory)
    print(f"built in {perf_counter() - started_s:.1f} s")
    engine = load_walked(directory)
    yield engine
    assert isinstance(engine.executor, TensorRtExecutor)
    engine.executor.close()


@pytest.fixture(scope="module")
def mixed(prompts: list[Prompt]) -> list[Prompt]:
    """Return the example's prompts, including some that are too long for decoding kernels."""
    results: list[Prompt] = []
    for first in range(0, len(prompts), 4):
        some = prompts[first : first + 4]
        text = "\n".join(prompt.prompt or "" for prompt in some)
        results += [*some, Prompt(f"{first}, joined", None, text)]
    return results


@contextmanager
def target_rows(engine: Engine, rows: set[int]) -> Iterator[None]:
    """Record how many rows each launch of the target has."""
    run = engine.executor.run

    def run_and_note(role: str, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        if role == "target":
            rows.add(len(feeds["token_ids"]))
        return run(role, feeds)

    engine.executor.run = run_and_note  # type: ignore[method-assign]
    try:
        yield
    finally:
        engine.executor.run = run  # type: ignore[method-assign]


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_a_draft_changes_no_bit(walked: Engine, mixed: list[Prompt], temperature: float) -> None:
    """Batches change no bit either: with a draft, sequences end at other times."""
    sampling = SamplingParams(temperature=temperature, seed=3)
    parameters = GenerateParams(max_new_tokens=TOKENS, sampling=sampling, ignore_eos=True)
    rows: set[int] = set()
    with target_rows(walked, rows):
        plain = records(walked, mixed, parameters, None)
    assert any(count > MAX_DECODE_ROWS for count in rows), "prompts' own kernels did not run"
    for name, shape in (("chain", CHAIN), ("tree", TREE)):
        drafted = records(walked, mixed, parameters, shape)
        for prompt, a, b in zip(mixed, plain, drafted, strict=True):
            assert len(b.output_ids) == TOKENS
            assert a.output_ids == b.output_ids, (name, prompt.id)
            assert a.logprobs == b.logprobs, (name, prompt.id)
        accepted = sum(sum(r.stats.acceptance_histogram[1:]) for r in drafted)
        assert accepted > len(mixed), name
    for prompt, expected in zip(mixed[8:11], plain[8:11], strict=True):
        (alone,) = records(walked, [prompt], parameters, None)
        assert alone.output_ids == expected.output_ids, prompt.id
        assert alone.logprobs == expected.logprobs, prompt.id


def test_drafts_change_no_bit_with_latents(tmp_path: Path, prompts: list[Prompt]) -> None:
    """Use the example's trained latents, whose kernels are also plugins."""
    model = tmp_path / "target"
    copytree(EXAMPLE / "target", model)
    copy(EXAMPLE / "mla-64" / "mla_kv.safetensors", model)
    build_walked(tmp_path / "engine", model)
    engine = load_walked(tmp_path / "engine")
    groups = {group.name for group in engine.manifest.cache_groups}
    assert groups & {"latent", "latent_sliding"}
    sampling = GenerateParams(max_new_tokens=TOKENS, ignore_eos=True)
    plain = records(engine, prompts[:8], sampling, None)
    for shape in (CHAIN, TREE):
        drafted = records(engine, prompts[:8], sampling, shape)
        for a, b in zip(plain, drafted, strict=True):
            assert (a.output_ids, a.logprobs) == (b.output_ids, b.logprobs)
        assert sum(sum(r.stats.acceptance_histogram[1:]) for r in drafted) > 8
    assert isinstance(engine.executor, TensorRtExecutor)
    engine.executor.close()


@pytest.mark.parametrize("shape", [None, CHAIN], ids=["plain", "chain"])
def test_tokens_equal_the_cuda_engine(
    walked: Engine, engine: Engine, prompts: list[Prompt], shape: DraftShape | None
) -> None:
    """Compare the next token after equal tokens, and the speed: prompts use other kernels there."""
    sampling = GenerateParams(max_new_tokens=FORCED, ignore_eos=True)
    started_s = perf_counter()
    actual = records(walked, prompts[:8], sampling, shape)
    middle_s = perf_counter()
    desired = records(engine, prompts[:8], sampling, shape)
    ended_s = perf_counter()
    tokens = 8 * FORCED
    print(
        f"walked plugins {tokens / (middle_s - started_s):.0f} tokens/s, "
        f"cuda {tokens / (ended_s - middle_s):.0f} tokens/s"
    )
    assert walked.text is not None
    one = replace(sampling, max_new_tokens=1)
    same = total = 0
    for record, other in zip(actual, desired, strict=True):
        same += record.output_ids[0] == other.output_ids[0]
        total += 1
        for count in range(4, FORCED, 4):
            ids = tuple(other.output_ids[:count])
            (next_one,) = records(walked, [Prompt("p", prompt_ids=ids)], one, None)
            (wanted_one,) = records(engine, [Prompt("p", prompt_ids=ids)], one, None)
            same += next_one.output_ids == wanted_one.output_ids
            total += 1
    print(f"{same} of {total} tokens equal")
    assert same >= 0.97 * total
