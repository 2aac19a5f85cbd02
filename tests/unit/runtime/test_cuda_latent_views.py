"""Partial views of latents on a device: keys are rebuilt at the positions of the view."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_draft, write_target
from indexer_files import write_indexers
from latent_files import write_latents
from plan_host import lowered_engine
from test_cuda_selections import CHAIN, VIEWED, Device, device, options
from toy_engine import run

from specbuild.builder import build as building
from specbuild.builder.backends.cuda.engine import LoweredEngine
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.engine import Engine
from specbuild.runtime.request import GenerateParams

# Two blocks of 16 are kept in any case, one of the four before them is retrieved.
PROMPT, TOKENS, BLOCKS = 85, 12, 1
SIZES = {"max_seq_len": 128, "specpv_score": "indexer", "dsa_check_interval": 0}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("latents")
    write_target(path / "t")
    write_indexers(path / "t", [1, 3], width=16)
    write_latents(path / "t", {0: 12, 1: 20, 2: 12, 3: 12})
    write_draft(path / "d")
    return path


@pytest.fixture(scope="module")
def lowered(checkpoints: Path) -> LoweredEngine:
    return lowered_engine(**options(checkpoints, **VIEWED, **SIZES))


def params(blocks: int) -> GenerateParams:
    return GenerateParams(
        max_new_tokens=TOKENS, ignore_eos=True, dsa_top_k=0, specpv_retrieval_blocks=blocks
    )


def prompt() -> list[int]:
    return np.random.default_rng(7).integers(3, 250, PROMPT).tolist()


def record(engine: Engine, blocks: int) -> Any:
    return run(engine, [prompt()], params(blocks), speculation=CHAIN).records[0]


@pytest.mark.slow
def test_small_views_equal_the_cpu_engine(lowered: LoweredEngine, checkpoints: Path) -> None:
    """Compare log-probabilities over a part of the context, while both emit the same tokens."""
    asked = options(checkpoints, **VIEWED, **SIZES, output=checkpoints / "cpu")
    building.build(BuildOptions.from_flat(**asked), SilentProgress())
    theirs = record(Engine.load(checkpoints / "cpu"), BLOCKS)
    viewing: Device = device(lowered, specpv=True)
    ours, whole = record(viewing.engine, BLOCKS), record(viewing.engine, 0)
    for found in (ours, theirs):
        stats = found.stats.specpv
        assert stats is not None and stats.partial_steps > 3 and not stats.invariant_failures
    pairs = zip(ours.output_ids, theirs.output_ids, strict=True)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), TOKENS)
    assert same > 4

    def distance(one: Any) -> float:
        near = np.subtract(one.logprobs[:same], theirs.logprobs[:same])
        return float(np.abs(near).mean())

    assert 4 * distance(ours) < distance(whole), (distance(ours), distance(whole), same)


def test_steps_receive_the_positions_of_view_pages(lowered: LoweredEngine) -> None:
    """Only full-attention layers in steps get the positions of pages, and prompts do not."""
    for entry, program in lowered.programs:
        calls = [call for call in program.ir.calls if call.op.name == "MlaAttention"]
        told = ["page_position" in call.inputs for call in calls]
        positions = [call for call in program.ir.calls if call.op.name == "ViewPositions"]
        assert len(positions) == int(entry.kind == "step")
        assert told == [entry.kind == "step" and i % 2 == 1 for i in range(len(calls))]
