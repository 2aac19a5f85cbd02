"""The EAGLE3 module, run with the ops' references, against the independent dense draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_draft, write_target

from specbuild.builder.checkpoint.draft_checkpoint import DraftCheckpoint
from specbuild.builder.families.checkpoints import read_draft, read_target
from specbuild.builder.families.eagle3.model import DraftFuse, Eagle3
from specbuild.builder.families.eagle3.reference import load_reference_draft
from specbuild.builder.families.parts.graph_io import GroupView, LatentPool, Launch, LayerPools
from specbuild.builder.families.parts.rope import rope_tables
from specbuild.runtime.engine_dir.drafters.eagle3 import Eagle3Geometry

PAGE, PAGES = 4, 12
COMMITTED = 9

LATENT = {
    "kv_lora_rank": 40, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 20,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "layers.0": {"prefix": "layers.0"},
    "own embedding": {"own_embedding": True},
    "target's head": {"draft_vocab": None},
    "no embedding half": {"input_width": "hidden"},
    "norm before fc": {"norm_before_fc": True},
    "norm per state": {"fc_norm": True},
    "normed residual": {"norm_before_residual": True},
    "normed output": {"norm_output": True},
    "two aux layers": {"aux_layers": (0, 2)},
    "one aux layer thrice": {"aux_layers": (1, 1, 1)},
    "windowed": {"sliding_window": 5},
    "three layers": {"layers": 3, "norm_output": True},
    "two windowed layers": {"layers": 2, "prefix": "layers.0", "sliding_window": 5},
    "16 heads on a KV head": {"q_heads": 16, "kv_heads": 1, "head_dim": 16},
    "MLA": {"latent": LATENT | {"q_lora_rank": 48}, "norm_before_residual": True},
    "MLA without a query's latent": {"latent": LATENT | {"q_lora_rank": None}, "fc_norm": True},
    "two layers of MLA, YaRN": {
        "latent": LATENT | {"q_lora_rank": 48, "rope_interleave": False},
        "layers": 2,
        "rope_scaling": {
            "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 16,
            "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
        },
    },
}  # fmt: skip


def load(module: torch.nn.Module, draft: DraftCheckpoint, shared: dict[str, torch.Tensor]) -> Any:
    own = {f"draft.{name}": tensor.load().float() for name, tensor in draft.tensors.items()}
    missing, _ = module.load_state_dict({**own, **shared}, strict=False)
    assert missing == []
    return module.eval()


def level(first: int, rows: int) -> tuple[Launch, GroupView]:
    """Return rows at positions first, first + 1, …; the page table is in falling order."""
    positions = torch.arange(first, first + rows, dtype=torch.int32)
    table = torch.arange(PAGES - 1, 0, -1, dtype=torch.int32).view(1, 1, 1, -1)
    slots = table.flatten()[positions // PAGE] * PAGE + positions % PAGE
    launch = Launch(
        positions,
        torch.tensor([0, rows], dtype=torch.int32),
        torch.zeros(rows, 1, dtype=torch.int32),
        torch.tensor([rows - 1], dtype=torch.int32),
    )
    return launch, GroupView(
        table, positions, torch.tensor([first + rows], dtype=torch.int32), slots
    )


def empty_pools(d: Eagle3Geometry) -> LayerPools | LatentPool:
    """Return pools whose slots must not be read."""
    parts = "kv" if d.mla is None else "c"
    empty = [torch.full((PAGES, d.kv_heads, PAGE, d.head_dim), float("nan")) for _ in parts]
    return LayerPools(*empty) if d.mla is None else LatentPool(*empty)


@pytest.mark.parametrize("variant", VARIANTS)
def test_chain_matches_the_reference(tmp_path: Path, variant: str) -> None:
    write_target(tmp_path / "t")
    write_draft(tmp_path / "d", **VARIANTS[variant])
    target = read_target(tmp_path / "t", strict=True)
    g = target.geometry
    draft = read_draft(tmp_path / "d", g, strict=False)
    d = draft.geometry
    embedding = target.tensors["model.embed_tokens.weight"].load().float()
    head = target.tensors["lm_head.weight"].load().float()
    reference = load_reference_draft(tmp_path / "d", embedding=embedding, head=head)
    cos, sin = rope_tables(d.rope, d.rotated, PAGE * PAGES)
    shared = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "draft_rope_cos": cos,
        "draft_rope_sin": sin,
    }
    fuse = load(DraftFuse(d, g), draft, {})
    module = load(Eagle3(d, g, PAGE * PAGES), draft, shared)
    generator = torch.Generator().manual_seed(3)
    aux_hidden = torch.randn(COMMITTED, len(d.aux_layers) * g.hidden, generator=generator)
    ids = torch.randint(0, g.vocab, (COMMITTED + 3,), generator=generator)
    pools = tuple(empty_pools(d) for _ in range(d.layers))
    with torch.no_grad():
        expected = reference.follow(aux_hidden, ids[:COMMITTED], ids[COMMITTED:])
        hidden, first, logits, pre_heads = fuse(aux_hidden), 0, [], []
        torch.testing.assert_close(hidden, reference.fuse(aux_hidden), atol=1e-5, rtol=1e-5)
        for count in (COMMITTED, 1, 1, 1):
            launch, view = level(first, count)
            part, hidden, pools, _, _, pre_head = module(
                ids[first : first + count].int(), hidden, launch, view, pools
            )
            hidden, first = hidden[-1:], first + count
            logits.append(part)
            pre_heads.append(pre_head)
    torch.testing.assert_close(torch.cat(logits), expected.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.cat(pre_heads), expected.pre_head, atol=1e-4, rtol=1e-4)
