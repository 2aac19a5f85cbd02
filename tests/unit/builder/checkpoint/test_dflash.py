"""DFlash drafts in every config format, and rejected drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import edit_config, edit_tensors, remove_fields
from dflash_drafts import AUX_LAYERS, BLOCK, MASK_TOKEN, write_dflash

from specbuild.builder.families.checkpoints import read_draft
from specbuild.runtime.engine_dir.drafters.dflash import DFlashGeometry
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.errors import SpecbuildError


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_fields_of_a_config(
    tmp_path: Path, geometry: TargetGeometry, causal: bool, normed: bool
) -> None:
    written = write_dflash(tmp_path, layers=3, causal=causal, normed=normed)
    draft = read_draft(tmp_path, geometry, strict=True)
    g = draft.geometry
    assert isinstance(g, DFlashGeometry)
    assert (g.layers, g.causal, g.block_size, g.mask_token) == (3, causal, BLOCK, MASK_TOKEN)
    assert (g.aux_layers, g.attention.qk_norm) == (AUX_LAYERS, "head" if normed else "none")
    assert set(draft.tensors) == set(written)
    assert all(torch.equal(draft.tensors[n].load(), t) for n, t in written.items())
    (note,) = draft.warnings
    assert "RoPE is" in note  # YaRN, as in the target


def test_speculators_config(tmp_path: Path, geometry: TargetGeometry) -> None:
    write_dflash(tmp_path)
    fields = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    fields += ("head_dim", "intermediate_size", "rms_norm_eps", "rope_theta", "vocab_size")
    sizes = (64, 2, 4, 2, 32, 96, 1e-5, 10000.0, 256)
    remove_fields(tmp_path, *fields, "dflash_config", "layer_types", "max_position_embeddings")
    edit_config(
        tmp_path, architectures=["DFlashSpeculator"], speculators_model_type="dflash",
        transformer_layer_config=dict(zip(fields, sizes, strict=True)) | {"model_type": "qwen3"},
        mask_token_id=7, aux_hidden_state_layer_ids=[0, 1, 2], draft_vocab_size=256,
    )  # fmt: skip
    g = read_draft(tmp_path, geometry, strict=False).geometry
    assert isinstance(g, DFlashGeometry)
    assert (g.mask_token, g.aux_layers, g.block_size, g.causal) == (7, (0, 1, 2), BLOCK, False)
    edit_config(tmp_path, speculators_model_type="jetspec")
    assert read_draft(tmp_path, geometry, strict=False).geometry.causal


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "windows": ({"layer_types": ["full_attention", "sliding_attention"]},
                "expected only full_attention in a DFlash draft"),
    "no layers": ({"dflash_config": {"mask_token_id": 5}}, "the layers of the target are missing"),
    "no mask": ({"dflash_config": {"target_layer_ids": [0]}}, "the field mask_token_id is missing"),
    "two blocks": ({"dflash_config": {"block_size": 4, "mask_token_id": 5,
                                      "target_layer_ids": [0, 2, 3]}}, "dflash_config's 4"),
    "one token": ({"block_size": 1}, "a whole number of 2 or more"),
    "mask beyond": ({"dflash_config": {"mask_token_id": 256, "target_layer_ids": [0, 2, 3]}},
                    "its mask token 256 is not below the target's vocabulary of 256"),
    "layers beyond": ({"dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 2, 4]}},
                      r"reads layers \[4\], but the target has layers 0 to 3"),
    "other width": ({"hidden_size": 32}, "its hidden size is 32, the target's 64"),
    "other vocabulary": ({"vocab_size": 9}, "its vocab_size is 9, the target's 256"),
    "another kind": ({"speculators_model_type": "dspark"}, "'dflash' or 'jetspec'"),
    "walks": ({"projector_type": "domino"}, "projector_type 'domino' is not implemented"),
    "unknown field": ({"drafts_backwards": True}, "unknown fields drafts_backwards"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_rejects_invalid_configs(tmp_path: Path, geometry: TargetGeometry, case: str) -> None:
    changes, message = REFUSED[case]
    write_dflash(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(SpecbuildError, match=message):
        read_draft(tmp_path, geometry, strict=True)


def test_rejects_invalid_tensors_and_options(tmp_path: Path, geometry: TargetGeometry) -> None:
    write_dflash(tmp_path)
    with pytest.raises(SpecbuildError, match="needs an EAGLE3 draft, but this is a DFlash draft"):
        read_draft(tmp_path, geometry, strict=True, norm_output="head")
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": torch.zeros(16, 64)}))
    with pytest.raises(SpecbuildError, match="separate head or vocabulary are not supported"):
        read_draft(tmp_path, geometry, strict=True)
    edit_tensors(tmp_path, lambda t: [t.pop("lm_head.weight"), t.pop("hidden_norm.weight")])
    with pytest.raises(SpecbuildError, match=r"missing.*: hidden_norm\.weight"):
        read_draft(tmp_path, geometry, strict=True)
