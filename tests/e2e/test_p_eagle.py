"""Engines that draft with P-EAGLE, against plain torch and transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_target
from draft_rounds import check_rounds, likeliest, parts_of
from p_eagle_drafts import PlainPEagle, write_p_eagle
from random_weights import Tensors
from safetensors.torch import load_file

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.verify.engine_probe import EngineProbe
from specbuild.runtime.draft.p_eagle import PEagleDrafter
from specbuild.runtime.engine_dir.manifest import DraftShape

VOCAB, MOST = 48, 128
CHAIN, TREE = DraftShape(1, 7, 7), DraftShape(3, 4, 12)
VARIANTS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "four layers": {"layers": 4, "prefix": "layers.0", "spelling": "ptd_token_id"},
    "two layers, normed states": {"layers": 2, "fc_norm": True},
    "one norm in front": {"norm_before_fc": True},
}
SLOW = ("one layer", "four layers")


def built(folder: Path, **options: Any) -> Tensors:
    """A random GPT-OSS, a draft for it, and their engine; the draft's tensors."""
    write_target(folder / "model", vocab=VOCAB, dtype="f32", experts_format="bf16")
    tensors = write_p_eagle(
        folder / "draft", target_vocab=VOCAB, draft_vocab=32, dtype="f32", **options
    )
    options = BuildOptions(
        model=folder / "model",
        draft=folder / "draft",
        output=folder / "engine",
        limits=LimitOptions(max_seq_len=MOST, max_batch_size=3),
    )
    build(options, SilentProgress())
    return tensors


def embedding_of(folder: Path) -> torch.Tensor:
    return load_file(folder / "model" / "model.safetensors")["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in VARIANTS],
)
def test_drafts_are_those_of_the_published_maths(tmp_path: Path, name: str) -> None:
    """Round after round: what mask rows wrote is gone in the next one."""
    tensors = built(tmp_path, **VARIANTS[name])
    manifest = json.loads((tmp_path / "engine" / "manifest.json").read_text())
    assert manifest["warnings"][1:] == []
    assert "mask_hidden" in manifest["tensors"]["draft.mask_state"]["sources"]
    reference = PlainPEagle(tensors, embedding_of(tmp_path))
    target_ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]

    def expected(
        states: torch.Tensor, ids: torch.Tensor, shape: DraftShape
    ) -> set[tuple[int, ...]]:
        return likeliest(reference.logits(states, ids, shape.draft_depth), target_ids, shape)

    probe = EngineProbe(tmp_path / "engine")
    drafter = PEagleDrafter(parts_of(probe))
    rounds = [(2, CHAIN), (1, TREE), (8, DraftShape(1, 1, 1)), (1, CHAIN), (0, TREE)]
    check_rounds(drafter, probe.manifest, rounds, expected)
