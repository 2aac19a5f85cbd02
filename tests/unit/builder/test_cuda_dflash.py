"""DFlash and JetSpec in a CUDA engine's programs, by the plan's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_target
from dflash_drafts import AUX_LAYERS, BLOCK, PlainDFlash, write_dflash
from draft_rounds import likeliest
from drafted_programs import watched
from plan_host import PlanHost, lowered_engine, step_name

from specbuild.builder.backends.cuda.engine import LoweredEngine
from specbuild.builder.backends.cuda.step.programs import fits
from specbuild.builder.families.checkpoints import read_draft, read_target
from specbuild.runtime.engine_dir.manifest import DraftShape

LEVELS = BLOCK - 1
CHAIN, SHORT, TREE = DraftShape(1, 4, 4), DraftShape(1, 2, 2), DraftShape(3, LEVELS, 9)
# Of logits in bf16, against fp32 all the way; relative to the largest.
TOLERANCE = 0.05
PROMPTS = ([7, 50, 9] * 15, [3, 4, 200, 41, 8, 90, 16, 77, 30, 31, 32, 33, 5, 6, 100, 101] * 3)


def write(folder: Path, **options: Any) -> tuple[PlainDFlash, LoweredEngine]:
    """A target, its draft in plain torch, and the engine's programs."""
    target = write_target(folder / "target", layers=4, head_dim=32)
    tensors = write_dflash(folder / "draft", dtype=torch.bfloat16, **options)
    shared = (target[name].float() for name in ("model.embed_tokens.weight", "lm_head.weight"))
    lowered = lowered_engine(
        folder / "target", folder / "draft", max_seq_len=64, max_batch_size=2, page_size=16,
        draft_top_k=TREE.draft_top_k, draft_depth=LEVELS, draft_tokens=TREE.draft_tokens,
    )  # fmt: skip
    return PlainDFlash(tensors, *shared), lowered


def states_of(lowered: LoweredEngine, ids: list[int]) -> torch.Tensor:
    """The target's states of tokens, [L, aux layers · H], by the program that scores."""
    host = PlanHost(lowered)
    host.give_pages(0)
    host.score(0, ids)
    assert host.port("score.captured").shape[1] == len(AUX_LAYERS) * 64
    return host.port("score.captured")[: len(ids)].float().clone()


@pytest.mark.parametrize(
    "options",
    [{"causal": True}, *(pytest.param(o, marks=pytest.mark.slow) for o in ({}, {"normed": False}))],
    ids=str,
)
def test_steps_draft_by_the_published_maths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """After prompts, after plain steps, and up to the longest text; no block leaves a trace."""
    plain, lowered = write(tmp_path, **options)
    causal, host, drafted = bool(options.get("causal")), PlanHost(lowered), watched(monkeypatch)
    host.port("ignore_eos").fill_(1)
    texts = [list(ids) for ids in PROMPTS]
    for row, ids in enumerate(texts):
        ids.append(host.admit(row, ids, 64 - len(ids))[0])
    shapes = [CHAIN, TREE, None, None, SHORT, "step@2.extends", TREE]
    while not host.port("done").all():
        shape = shapes.pop(0) if shapes else CHAIN
        alive = [not host.port("done")[row] for row in range(2)]
        steps = host.step(shape if isinstance(shape, str) else step_name(2, shape))
        for row, step in enumerate(steps):
            if alive[row] and isinstance(shape, DraftShape):
                states = states_of(lowered, texts[row][:-1])
                expected = plain.logits(states, texts[row][-1], causal=causal)[: shape.draft_depth]
                found = drafted.logits.view(2, shape.draft_depth, -1)[row]
                assert (found - expected).abs().max() < TOLERANCE * expected.abs().max()
                assert drafted.paths(row) == likeliest(found, torch.arange(256), shape)
            texts[row] += step.tokens
    assert [len(ids) for ids in texts] == [64, 64]


def test_tokens_are_those_without_a_draft(tmp_path: Path) -> None:
    _, lowered = write(tmp_path)
    for _, program in lowered.programs:
        # A context has no queries: nothing of a program is empty, which loading would refuse.
        for call in lowered.writer.program(program).ops:
            assert all(
                0 not in binding.shape
                for binding in (*call.inputs.values(), *call.outputs.values())
            )
    outputs = []
    for shape in (None, CHAIN, TREE):
        host = PlanHost(lowered)
        host.port("ignore_eos").fill_(1)
        first = host.admit(0, list(PROMPTS[1]), 20)[0]
        outputs.append([first, *host.generate(0, step_name(1, shape), 19)][:20])
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.fixture(scope="module")
def geometry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("geometry")
    write_target(folder / "target")
    write_dflash(folder / "draft")
    target = read_target(folder / "target", strict=True).geometry
    yield read_draft(folder / "draft", target, strict=True).geometry


def test_a_whole_block_is_a_launch(geometry: Any) -> None:
    """Whatever of it is asked for; one that is causal is as long as its levels."""
    assert fits(64, SHORT, 2)
    assert not fits(64, SHORT, 2, geometry) and fits(32, SHORT, 2, geometry)
