"""The example model as a CUDA engine, its prompts, and its outputs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.decode.decoder import Speculation
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.executors.cuda.executor import CudaExecutor
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams
from specbuild.runtime.settings import DEFAULT_SETTINGS, RuntimeSettings

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-gpt-oss"
CHAIN, TREE = DraftShape(1, 3, 3), DraftShape(3, 4, 12)


def build_example(output: Path, shape: DraftShape = TREE, **changes: Any) -> Path:
    """Build it with its draft, for batches of 8 and trees of up to ``shape``."""
    usual = {"model": EXAMPLE / "target", "backend": "cuda", "max_seq_len": 1024}
    build_options = {**usual, "max_batch_size": 8, **asdict(shape), **changes}
    options = BuildOptions.from_flat(draft=EXAMPLE / "draft", output=output, **build_options)
    build(options, SilentProgress())
    return output


@contextmanager
def on_gpu(directory: Path, settings: RuntimeSettings = DEFAULT_SETTINGS) -> Iterator[Engine]:
    """Yield a CUDA engine; its memory is released afterwards."""
    engine = Engine.load(directory, settings)
    assert isinstance(engine.executor, CudaExecutor)
    try:
        yield engine
    finally:
        engine.executor.close()


def linked_target(folder: Path, source: Path = EXAMPLE / "target") -> Path:
    """Link the files of a model into ``folder``, where other files may be added."""
    model = folder / "target"
    model.mkdir()
    for file in source.iterdir():
        (model / file.name).symlink_to(file)
    return model


def example_prompts() -> list[Prompt]:
    """Return the prompts of the example model."""
    lines = (EXAMPLE / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [Prompt(r["id"], None, r["prompt"]) for r in map(json.loads, lines)]


def random_prompts(vocab: int, lengths: Sequence[int]) -> list[Prompt]:
    """Return random prompts of tokens from 3 on, the same at every call."""
    random = np.random.default_rng(7)
    return [Prompt(str(n), tuple(random.integers(3, vocab, n).tolist())) for n in lengths]


def every_other_sampled(count: int, tokens: int) -> list[GenerateParams]:
    """Return parameters of requests, every second of which uses sampling."""
    return [
        GenerateParams(
            max_new_tokens=tokens,
            sampling=SamplingParams(temperature=float(i % 2), seed=i),
            ignore_eos=True,
        )
        for i in range(count)
    ]


def records(
    engine: Engine,
    prompts: list[Prompt],
    expected: GenerateParams | Sequence[GenerateParams],
    shape: Speculation = "default",
    *,
    drafter: str = "auto",
) -> list[RunRecord]:
    """Return the record of each prompt, in order."""
    events = engine.generate(prompts, expected, speculation=shape, drafter=drafter)
    result = {e.request: e.record for e in events if isinstance(e, FinishEvent)}
    return [result[i] for i in range(len(prompts))]


def outputs(result: Sequence[RunRecord]) -> list[tuple[tuple[int, ...], object]]:
    """Return tokens and log-probabilities, for a comparison bit for bit."""
    return [(record.output_ids, record.logprobs) for record in result]
