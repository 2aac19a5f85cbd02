"""The example model as a CUDA engine, its prompts, and what it makes of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from specbuild.builder.build import build
from specbuild.builder.config import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.engine import Engine
from specbuild.runtime.manifest import DraftShape
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-gpt-oss"
CHAIN, TREE = DraftShape(1, 3, 3), DraftShape(3, 4, 12)


def build_example(
    output: Path,
    backend: Literal["cuda", "tensorrt"] = "cuda",
    model: Path = EXAMPLE / "target",
) -> None:
    """Builds it, with room for the tree and for batches of 8."""
    options = BuildOptions(
        model=model,
        draft=EXAMPLE / "draft",
        output=output,
        backend=backend,
        gpu="sm_90a",
        max_seq_len=1024,
        max_batch_size=8,
        draft_top_k=TREE.draft_top_k,
        draft_depth=TREE.draft_depth,
        draft_tokens=TREE.draft_tokens,
    )
    build(options, SilentProgress())


def example_prompts() -> list[Prompt]:
    """What stands beside the example model."""
    lines = (EXAMPLE / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [Prompt(r["id"], None, r["prompt"]) for r in map(json.loads, lines)]


def records(
    engine: Engine,
    prompts: list[Prompt],
    wanted: GenerateParams | Sequence[GenerateParams],
    shape: DraftShape | None,
) -> list[RunRecord]:
    """What the engine made of each prompt, in their order."""
    events = engine.generate(prompts, wanted, speculation=shape)
    found = {e.request: e.record for e in events if isinstance(e, FinishEvent)}
    return [found[i] for i in range(len(prompts))]
