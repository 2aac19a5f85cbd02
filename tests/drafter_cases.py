"""One case per kind of drafter: a tiny model with its draft, and what its engine must state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints import write_draft, write_target
from deepseek_checkpoints import add_predictor, write_deepseek
from dflash_drafts import BLOCK, MASK_TOKEN, write_dflash
from mimo_checkpoints import write_mimo
from p_eagle_drafts import MASK_TOKEN as P_EAGLE_MASK
from p_eagle_drafts import write_p_eagle

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions, LimitOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.engine_dir.manifest import DraftShape

VOCAB = 48
MTP = Path("mtp")
CHAIN, TREE = DraftShape(1, 4, 4), DraftShape(3, 4, 12)


@dataclass(frozen=True)
class DrafterCase:
    """A kind of drafter.

    ``write`` writes ``folder / "model"`` and the draft, and returns what ``--draft`` names.
    ``geometry`` are fields of the drafter's geometry in the manifest, ``feature`` the manifest's
    feature, ``shown`` a part of what ``inspect`` prints, ``stages`` those that ``verify`` compares.
    """

    write: Callable[[Path], Path]
    kind: str
    shown: str
    stages: tuple[str, ...]
    chain: DraftShape = CHAIN
    tree: DraftShape = TREE
    feature: str | None = None
    geometry: Mapping[str, Any] = field(default_factory=dict)


def _gpt_oss(folder: Path) -> None:
    write_target(folder / "model", vocab=VOCAB, dtype="f32", experts_format="bf16")


def _eagle3(folder: Path) -> Path:
    _gpt_oss(folder)
    write_draft(folder / "draft", target_vocab=VOCAB, draft_vocab=32, dtype="f32")
    return folder / "draft"


def _p_eagle(folder: Path) -> Path:
    _gpt_oss(folder)
    write_p_eagle(folder / "draft", target_vocab=VOCAB, draft_vocab=32, dtype="f32")
    return folder / "draft"


def _dflash(folder: Path, **options: Any) -> Path:
    _gpt_oss(folder)
    write_dflash(folder / "draft", vocab=VOCAB, **options)
    return folder / "draft"


def _deepseek(folder: Path) -> Path:
    write_deepseek(folder / "model")
    add_predictor(folder / "model")
    return MTP


def _mimo(folder: Path) -> Path:
    rope = {"rope_type": "default", "rope_theta": 500.0}
    write_mimo(folder / "model", rope_parameters=rope)
    return MTP


LEVELS = ("aux hidden states", "fuse", "draft attention", "draft ffn", "draft pre_head")
BLOCK_CHAIN = DraftShape(1, BLOCK - 1, BLOCK - 1)
CASES: dict[str, DrafterCase] = {
    "eagle3": DrafterCase(
        _eagle3, "eagle3", "LlamaForCausalLMEagle3", ("aux hidden states", *LEVELS)
    ),
    "p-eagle": DrafterCase(
        _p_eagle,
        "p-eagle",
        "P-EAGLE",
        ("draft mask rows",),
        chain=DraftShape(1, 7, 7),
        feature="p_eagle",
        geometry={"mask_token": P_EAGLE_MASK},
    ),
    "dflash": DrafterCase(
        _dflash,
        "dflash",
        f"DFlash, non-causal; blocks of {BLOCK}, mask {MASK_TOKEN}",
        ("draft block",),
        chain=BLOCK_CHAIN,
        feature="dflash",
        geometry={"block_size": BLOCK},
    ),
    "jetspec": DrafterCase(
        lambda folder: _dflash(folder, causal=True),
        "dflash",
        "JetSpec, causal",
        ("draft block",),
        chain=BLOCK_CHAIN,
        feature="dflash",
        geometry={"block_size": BLOCK},
    ),
    "mtp of DeepSeek-V3": DrafterCase(
        _deepseek, "mtp", "MTP layer of the model", LEVELS, feature="mtp"
    ),
    "mtp of MiMo": DrafterCase(_mimo, "mtp", "MTP layer of the model", LEVELS, feature="mtp"),
}


def build_case(case: DrafterCase, folder: Path) -> Path:
    """Write the checkpoints and build their engine at ``folder / "engine"``; return ``--draft``."""
    draft = case.write(folder)
    options = BuildOptions(
        model=folder / "model",
        draft=draft,
        output=folder / "engine",
        limits=LimitOptions(max_seq_len=128, max_batch_size=3),
    )
    build(options, SilentProgress())
    return draft
