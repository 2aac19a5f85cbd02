"""An MTP layer in a CUDA engine's programs, by the plan's interpreter."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from deepseek_checkpoints import add_predictor, write_deepseek
from drafted_programs import Drafted, watched
from left_out import slow
from mimo_checkpoints import PlainMimoMtp, write_mimo
from plan_host import PlanHost, lowered_engine, step_name

from specbuild.builder.backends.cuda.check import require_cuda_support
from specbuild.builder.backends.cuda.engine import LoweredEngine
from specbuild.builder.families.family import DraftSizes
from specbuild.builder.families.mtp.reference import load_reference_mtp
from specbuild.builder.families.registry import synth_draft
from specbuild.builder.synth.geometry import named_geometry
from specbuild.builder.training.frozen_target import load_target
from specbuild.runtime.engine_dir.drafters.mtp import MtpGeometry
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import SpecbuildError

LAYERS, VOCAB = 2, 32
CHAIN, SHORT, TREE = DraftShape(1, 4, 4), DraftShape(1, 2, 2), DraftShape(3, 4, 9)
# Of logits in bf16, against fp32 all the way; relative to the largest.
TOLERANCE = 0.05
PROMPTS = ([7, 20, 9] * 15, [3, 4, 30, 11, 8, 9, 16, 7, 30, 31, 12, 13, 5, 6, 10, 2] * 3)


@dataclass(frozen=True)
class Layer:
    """A layer in plain torch.

    ``fuse`` norms the target's last states. ``follow(states, ids, path)``: logits [1 + m, V] at the
    last of ``ids`` and down a path of m drafts.
    """

    fuse: Callable[[torch.Tensor], torch.Tensor]
    follow: Callable[[torch.Tensor, list[int], list[int]], torch.Tensor]


Made: TypeAlias = tuple[Layer, LoweredEngine]


def mimo(path: Path) -> Layer:
    """MiMo's, whose model is written too."""
    rope = {"rope_type": "default", "rope_theta": 500.0}
    tensors = write_mimo(
        path, num_hidden_layers=LAYERS, dtype="bfloat16", head_dim=32, rope_parameters=rope
    )
    plain = PlainMimoMtp(tensors, heads=4, kv_heads=2, eps=0.02, theta=500.0)

    def fuse(last: torch.Tensor) -> torch.Tensor:
        scale = (last.square().mean(dim=1, keepdim=True) + plain.eps).rsqrt()
        return last * scale * plain.w["model.norm.weight"]

    return Layer(fuse, plain.follow)


def deepseek(path: Path, q_lora_rank: int | None = 32) -> Layer:
    """DeepSeek's, with dense layers of MLA, whose model is written too."""
    sizes = {"q_lora_rank": q_lora_rank, "kv_lora_rank": 64, "qk_rope_head_dim": 16,
             "qk_nope_head_dim": 32, "v_head_dim": 32}  # fmt: skip
    write_deepseek(path, dtype="bfloat16", first_k_dense_replace=LAYERS + 1, **sizes)
    add_predictor(path, layers=LAYERS)
    fields = json.loads((path / "config.json").read_text())
    plain = load_reference_mtp(path, load_target(path, teacher=False).float(), fields)

    def follow(hidden: torch.Tensor, ids: list[int], drafted: list[int]) -> torch.Tensor:
        found = []
        for place in range(1 + len(drafted)):
            rows = torch.tensor(ids + drafted[:place])
            states = plain.run(rows, hidden, torch.arange(len(rows)))
            found.append(states.logits[-1])
            hidden = torch.cat([hidden, states.recurrence[-1:]])
        return torch.stack(found)

    return Layer(plain.fuse, follow)


def deepseek_without_query_latents(path: Path) -> Layer:
    """The same, whose queries are projected from what the layer reads."""
    return deepseek(path, None)


WRITERS = [deepseek, *slow(mimo, deepseek_without_query_latents)]


@pytest.fixture(scope="module", params=WRITERS, ids=lambda write: write.__name__)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The layer in plain torch, and the programs of an engine that drafts with it."""
    path = tmp_path_factory.mktemp("mtp") / "model"
    layer = request.param(path)
    lowered = lowered_engine(
        path, Path("mtp"), max_seq_len=64, max_batch_size=2, page_size=16,
        draft_top_k=TREE.draft_top_k, draft_depth=TREE.draft_depth, draft_tokens=TREE.draft_tokens,
    )  # fmt: skip
    return layer, lowered


def states_of(plain: Layer, lowered: LoweredEngine, ids: list[int]) -> torch.Tensor:
    """The target's states of tokens after its final norm, [L, H]."""
    host = PlanHost(lowered)
    host.give_pages(0)
    host.score(0, ids)
    return plain.fuse(host.port("score.captured")[: len(ids)].float())


def test_steps_draft_by_the_published_maths(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
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
    plain: Layer,
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


def test_tokens_are_those_without_a_draft(made: Made) -> None:
    _, lowered = made
    outputs = []
    for shape in (None, CHAIN, TREE):
        host = PlanHost(lowered)
        host.port("ignore_eos").fill_(1)
        first, _ = host.admit(0, list(PROMPTS[1]), 16, temperature=1.0, seed=5)
        outputs.append([first, *host.generate(0, step_name(1, shape), 15)][:16])
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_layer_of_the_models_kind_is_taken() -> None:
    mimo = named_geometry("mimo-7b").target
    require_cuda_support(mimo, synth_draft("mtp").geometry(mimo, DraftSizes(1, 1)))


def test_experts_of_a_layer_are_taken_in_forms_that_kernels_decode() -> None:
    glm = named_geometry("glm-4.7-flash").target
    layer = synth_draft("mtp").geometry(glm, DraftSizes(1, 1))
    assert isinstance(layer, MtpGeometry)
    for dtype in ("bf16", "mxfp4"):
        require_cuda_support(glm, replace(layer, dtype=dtype))
    with pytest.raises(SpecbuildError, match="--draft-dtype fp8: the MTP layer has experts"):
        require_cuda_support(glm, replace(layer, dtype="fp8"))
