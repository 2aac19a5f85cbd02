"""Engines of several ranks on this machine's GPUs, or with all ranks on its only GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from example_engine import EXAMPLE, example_prompts
from tokenizers import Tokenizer

from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.files import read_manifest
from specbuild.runtime.executors.cuda.driver import gpu_count, open_gpu
from specbuild.runtime.executors.cuda.gpu import LaunchConfig
from specbuild.runtime.executors.cuda.loading import open_ranked
from specbuild.runtime.executors.cuda.ranked import RankedExecutor
from specbuild.runtime.request import Prompt


class SharedGpu:
    """One of several ranks on one GPU.

    No launch starts early: a waiting launch would occupy resources that another rank needs.
    """

    def __init__(self, number: int) -> None:
        del number
        self._gpu = open_gpu()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gpu, name)

    def launch(self, config: LaunchConfig, stream: Any) -> None:
        self._gpu.launch(replace(config, programmatic=False), stream)

    def reaches(self, peer: SharedGpu) -> bool:
        del peer
        return True

    def reach(self, peer: SharedGpu) -> None:
        """Do nothing: all memory is on this GPU."""


@contextmanager
def on_ranks(directory: Path) -> Iterator[Engine]:
    """Yield an engine of several ranks; its memory is released afterwards."""
    manifest = read_manifest(directory)
    alone = gpu_count() < manifest.ranks
    executor = open_ranked(
        directory, manifest, range(manifest.ranks), readers=4,
        open_device=SharedGpu if alone else open_gpu,
    )  # fmt: skip
    assert isinstance(executor, RankedExecutor)
    try:
        yield Engine(manifest, executor)
    finally:
        executor.close()


def example_token_prompts(count: int) -> list[Prompt]:
    """Return the example's first prompts as ids, since :func:`on_ranks` loads no tokenizer."""
    tokenizer = Tokenizer.from_file(str(EXAMPLE / "target" / "tokenizer.json"))
    return [
        Prompt(prompt.id, tuple(tokenizer.encode(prompt.prompt or "").ids))
        for prompt in example_prompts()[:count]
    ]
