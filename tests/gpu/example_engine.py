"""The example model as a CUDA engine, its prompts, and what it makes of them."""

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
    """Builds it with its draft, for batches of 8 and as deep as ``shape``; with other options."""
    usual = {"model": EXAMPLE / "target", "backend": "cuda", "max_seq_len": 1024}
    asked = {**usual, "max_batch_size": 8, **asdict(shape), **changes}
    options = BuildOptions.from_flat(draft=EXAMPLE / "draft", output=output, **asked)
    build(options, SilentProgress())
    return output


@contextmanager
def on_gpu(directory: Path, settings: RuntimeSettings = DEFAULT_SETTINGS) -> Iterator[Engine]:
    """A CUDA engine, whose memory is given back behind it."""
    engine = Engine.load(directory, settings)
    assert isinstance(engine.executor, CudaExecutor)
    try:
        yield engine
    finally:
        engine.executor.close()


def linked_target(folder: Path, source: Path = EXAMPLE / "target") -> Path:
    """A model of the same files in ``folder``, beside which others may be written."""
    model = folder / "target"
    model.mkdir()
    for file in source.iterdir():
        (model / file.name).symlink_to(file)
    return model


def example_prompts() -> list[Prompt]:
    """What stands beside the example model."""
    lines = (EXAMPLE / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [Prompt(r["id"], None, r["prompt"]) for r in map(json.loads, lines)]


def random_prompts(vocab: int, lengths: Sequence[int]) -> list[Prompt]:
    """Always the same ones, of tokens from 3 on."""
    random = np.random.default_rng(7)
    return [Prompt(str(n), tuple(random.integers(3, vocab, n).tolist())) for n in lengths]


def every_other_sampled(count: int, tokens: int) -> list[GenerateParams]:
    """Of so many requests every second one samples."""
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
    wanted: GenerateParams | Sequence[GenerateParams],
    shape: Speculation = "default",
    *,
    drafter: str = "auto",
) -> list[RunRecord]:
    """What the engine made of each prompt, in their order."""
    events = engine.generate(prompts, wanted, speculation=shape, drafter=drafter)
    found = {e.request: e.record for e in events if isinstance(e, FinishEvent)}
    return [found[i] for i in range(len(prompts))]


def outputs(found: Sequence[RunRecord]) -> list[tuple[tuple[int, ...], object]]:
    """Tokens and log-probabilities, which are compared bit for bit."""
    return [(record.output_ids, record.logprobs) for record in found]
