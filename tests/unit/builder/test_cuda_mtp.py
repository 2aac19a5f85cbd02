"""An MTP layer in a CUDA engine's programs, by the plan's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drafted_programs import Drafted, watched
from mimo_checkpoints import PlainMimoMtp, write_mimo
from plan_host import PlanHost, lowered_engine, step_name

from specbuild.builder.backends.cuda.check import require_cuda_support
from specbuild.builder.backends.cuda.engine import LoweredEngine
from specbuild.builder.families.family import DraftSizes
from specbuild.builder.families.registry import synth_draft
from specbuild.builder.synth.geometry import named_geometry
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import SpecbuildError

LAYERS, VOCAB = 2, 32
CHAIN, SHORT, TREE = DraftShape(1, 4, 4), DraftShape(1, 2, 2), DraftShape(3, 4, 9)
# Of logits in bf16, against fp32 all the way; relative to the largest.
TOLERANCE = 0.05
PROMPTS = ([7, 20, 9] * 15, [3, 4, 30, 11, 8, 9, 16, 7, 30, 31, 12, 13, 5, 6, 10, 2] * 3)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[PlainMimoMtp, LoweredEngine]:
    """The layer in plain torch, and the programs of an engine that drafts with it."""
    path = tmp_path_factory.mktemp("mtp") / "model"
    rope = {"rope_type": "default", "rope_theta": 500.0}
    tensors = write_mimo(
        path, num_hidden_layers=LAYERS, dtype="bfloat16", head_dim=32, rope_parameters=rope
    )
    lowered = lowered_engine(
        path, Path("mtp"), max_seq_len=64, max_batch_size=2, page_size=16,
        draft_top_k=TREE.draft_top_k, draft_depth=TREE.draft_depth, draft_tokens=TREE.draft_tokens,
    )  # fmt: skip
    return PlainMimoMtp(tensors, heads=4, kv_heads=2, eps=0.02, theta=500.0), lowered


def states_of(plain: PlainMimoMtp, lowered: LoweredEngine, ids: list[int]) -> torch.Tensor:
    """The target's states of tokens after its final norm, [L, H]."""
    host = PlanHost(lowered)
    host.give_pages(0)
    host.score(0, ids)
    last = host.port("score.captured")[: len(ids)].float()
    scale = (last.square().mean(dim=1, keepdim=True) + plain.eps).rsqrt()
    return last * scale * plain.w["model.norm.weight"]


def test_steps_draft_by_the_published_maths(
    made: tuple[PlainMimoMtp, LoweredEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every level after prompts, after plain steps, and up to the longest text."""
    plain, lowered = made
    host, drafted = PlanHost(lowered), watched(monkeypatch)
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
                states = states_of(plain, lowered, texts[row][:-1])
                check(plain, drafted, row, shape, states, texts[row][1:])
            texts[row] += step.tokens
    assert [len(ids) for ids in texts] == [64, 64]


def check(
    plain: PlainMimoMtp,
    drafted: Drafted,
    row: int,
    shape: DraftShape,
    states: torch.Tensor,
    ids: list[int],
) -> None:
    """Every node's token is among the best of its parent's, and a chain's logits are the layer's.

    ``ids`` are those behind the ``states``; the last is the root.
    """
    paths = drafted.paths(row)
    assert len(paths) == shape.draft_tokens
    deepest = max(paths, key=len)
    expected = plain.follow(states, ids, list(deepest[:-1]))
    if shape.draft_top_k == 1:
        found = torch.stack([level[row] for level in drafted.levels])
        assert (found - expected).abs().max() < TOLERANCE * expected.abs().max()
        assert deepest == tuple(found.argmax(dim=1).tolist())
        return
    for path in paths:
        logits = plain.follow(states, ids, list(path[:-1]))[-1]
        least = logits.topk(shape.draft_top_k).values[-1]
        assert logits[path[-1]] > least - TOLERANCE * logits.abs().max()


def test_tokens_are_those_without_a_draft(made: tuple[PlainMimoMtp, LoweredEngine]) -> None:
    _, lowered = made
    outputs = []
    for shape in (None, CHAIN, TREE):
        host = PlanHost(lowered)
        host.port("ignore_eos").fill_(1)
        first, _ = host.admit(0, list(PROMPTS[1]), 16, temperature=1.0, seed=5)
        outputs.append([first, *host.generate(0, step_name(1, shape), 15)][:16])
    assert outputs[0] == outputs[1] == outputs[2]


def test_layers_with_latents_are_refused() -> None:
    target = named_geometry("llama-3.1-8b").target
    layer = synth_draft("mtp").geometry(named_geometry("glm-4.7-flash").target, DraftSizes(1, 1))
    with pytest.raises(SpecbuildError, match="MTP layer caches latents"):
        require_cuda_support(target, layer)
    mimo = named_geometry("mimo-7b").target
    require_cuda_support(mimo, synth_draft("mtp").geometry(mimo, DraftSizes(1, 1)))
