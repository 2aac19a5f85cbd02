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
from specbuild.runtime.engine_dir.features import used_features
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


# Fields of a block's head and rows, as trainers write them.
DEEPSPEC = {
    "architectures": ["Qwen3DSparkModel"], "block_size": 7, "target_layer_ids": [0, 2, 3],
    "mask_token_id": 9, "markov_rank": 0, "markov_head_type": "vanilla",
    "enable_confidence_head": True, "confidence_head_with_markov": True,
}  # fmt: skip
SPECFORGE = {
    "architectures": ["DSparkDraftModel"], "block_size": 7,
    "dflash_config": {
        "projector_type": "dspark", "block_size": 7, "target_layer_ids": [0, 2, 3],
        "mask_token_id": 9, "markov_rank": 0, "markov_head_type": "vanilla",
        "enable_confidence_head": False, "is_causal": False,
    },
}  # fmt: skip
SPECULATORS = {
    "architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark", "block_size": 7,
    "mask_token_id": 9, "aux_hidden_state_layer_ids": [0, 2, 3], "sample_from_anchor": True,
    "markov_rank": 0, "speculators_version": "0.7.0",
}  # fmt: skip


@pytest.mark.parametrize("fields", [DEEPSPEC, SPECFORGE, SPECULATORS])
def test_dialects_of_dspark(tmp_path: Path, geometry: TargetGeometry, fields: dict) -> None:
    """Without a Markov head they are DFlash drafts, whose rows begin at the newest token."""
    write_dflash(tmp_path)
    copies = {"embed_tokens.weight": torch.ones(256, 64), "lm_head.weight": torch.ones(256, 64)}
    copies["confidence_head.proj.weight"] = torch.ones(1, 64)
    edit_tensors(tmp_path, lambda t: t.update(copies))
    remove_fields(tmp_path, "dflash_config")
    edit_config(tmp_path, **fields)
    draft = read_draft(tmp_path, geometry, strict=True)
    g = draft.geometry
    assert isinstance(g, DFlashGeometry)
    assert (g.mask_token, g.aux_layers, g.block_size, g.causal) == (9, (0, 2, 3), 7, False)
    assert (g.from_anchor, g.first_row, g.block, g.block_rows(2)) == (True, 0, 8, 7)
    assert not set(copies) & set(draft.tensors)
    assert f"{', '.join(sorted(copies))} are not used" in draft.warnings[0]
    assert "dflash_anchor" in used_features(g)


def test_the_newest_tokens_row_may_draft_nothing(tmp_path: Path, geometry: TargetGeometry) -> None:
    write_dflash(tmp_path, config_changes=DEEPSPEC | {"sample_from_anchor": False})
    edit_config(tmp_path, dflash_config=None)
    g = read_draft(tmp_path, geometry, strict=True).geometry
    assert isinstance(g, DFlashGeometry)
    assert (g.from_anchor, g.first_row, g.block) == (False, 1, 7)


@pytest.mark.parametrize(
    "section",
    [
        {"jetspec_config": {"mask_token_id": 5, "target_layer_ids": [0, 2, 3]}},
        {"dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 2, 3], "is_causal": True}},
        {"dspark_config": {"mask_token_id": 5, "target_layer_ids": [0, 2, 3], "causal": True}},
    ],
)
def test_causal_blocks_in_every_spelling(
    tmp_path: Path, geometry: TargetGeometry, section: dict
) -> None:
    write_dflash(tmp_path)
    edit_config(tmp_path, **{"dflash_config": None} | section)
    assert read_draft(tmp_path, geometry, strict=True).geometry.causal  # type: ignore[attr-defined]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "windows": ({"layer_types": ["full_attention", "sliding_attention"]},
                "expected only full_attention in a DFlash draft"),
    "no layers": ({"dflash_config": {"mask_token_id": 5}}, "the layers of the target are missing"),
    "no mask": ({"dflash_config": {"target_layer_ids": [0]}}, "the field mask_token_id is missing"),
    "two blocks": ({"dflash_config": {"block_size": 4, "mask_token_id": 5,
                                      "target_layer_ids": [0, 2, 3]}},
                   "expected the value in .*: dflash_config, 4"),
    "one token": ({"block_size": 1}, "a whole number of 2 or more"),
    "mask beyond": ({"dflash_config": {"mask_token_id": 256, "target_layer_ids": [0, 2, 3]}},
                    "its mask token 256 is not below the target's vocabulary of 256"),
    "layers beyond": ({"dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 2, 4]}},
                      r"reads layers \[4\], but the target has layers 0 to 3"),
    "other width": ({"hidden_size": 32}, "its hidden size is 32, the target's 64"),
    "other vocabulary": ({"vocab_size": 9}, "its vocab_size is 9, the target's 256"),
    "another kind": ({"speculators_model_type": "medusa"}, "'dflash', 'jetspec' or 'dspark'"),
    "Domino": ({"projector_type": "domino"}, r"Domino \(a GRU over the block's tokens\) is not"),
    "DSpark": (DEEPSPEC | {"markov_rank": 256, "dflash_config": None},
               r"DSpark with a Markov head \(markov_rank 256\) is not supported"),
    "DFlash 2": ({"dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 2, 3],
                                    "conv_kernel_size": 2, "selector_rank": 256}},
                 r"DFlash 2 \(convolutions in the block\) is not supported"),
    "DFlash 2 by name": ({"architectures": ["DFlash2DraftModel"]}, "DFlash 2"),
    "unknown projector": ({"projector_type": "mamba"}, "'dflash', 'dspark' or 'jetspec'"),
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
