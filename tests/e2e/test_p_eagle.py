"""Engines that draft with P-EAGLE, against plain torch and transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_target
from command_line import Command
from draft_rounds import check_rounds, likeliest, parts_of
from drafted_outputs import check_greedy, check_sampled
from p_eagle_drafts import MASK_TOKEN, PlainPEagle, write_p_eagle
from random_weights import Tensors
from safetensors.torch import load_file

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.verify import verify_engine
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("p-eagle")
    built(folder)
    return folder


def embedding_of(folder: Path) -> torch.Tensor:
    return load_file(folder / "model" / "model.safetensors")["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in VARIANTS],
)
def test_drafts_are_those_of_the_published_maths(tmp_path: Path, name: str) -> None:
    """Round after round: what mask rows wrote is gone in the next one."""
    tensors = built(tmp_path, **VARIANTS[name])
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


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_greedy_output_is_transformers(folder: Path, shape: DraftShape) -> None:
    check_greedy(folder, shape)


def test_sampled_output_does_not_depend_on_the_draft(folder: Path) -> None:
    check_sampled(folder, (CHAIN, TREE))


def test_the_manifest_says_what_drafts(folder: Path, command: Command) -> None:
    manifest = json.loads((folder / "engine" / "manifest.json").read_text())
    (drafter,) = manifest["drafters"]
    assert (drafter["kind"], drafter["geometry"]["mask_token"]) == ("p-eagle", MASK_TOKEN)
    assert "p_eagle" in manifest["features"] and manifest["warnings"][1:] == []
    assert "mask_hidden" in manifest["tensors"]["draft.mask_state"]["sources"]
    shown = command("inspect", folder / "engine")
    assert shown.code == 0 and "P-EAGLE" in shown.out


def test_verify_compares_its_stages(folder: Path) -> None:
    report = verify_engine(folder / "engine", folder / "model", folder / "draft", SilentProgress())
    stages = {row.stage: row for row in report.rows}
    assert stages["draft mask rows"].rows > 0
    assert report.passed
