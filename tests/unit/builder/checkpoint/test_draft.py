"""EAGLE3 drafts in their variants, and rejected drafts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from checkpoint_files import edit_config, edit_tensors, remove_fields
from checkpoints import write_draft

from specbuild.builder.families.checkpoints import read_draft
from specbuild.builder.families.eagle3.checkpoint import default_aux_layers
from specbuild.builder.families.eagle3.tensors import draft_tensors
from specbuild.runtime.engine_dir.drafters.eagle3 import Eagle3Geometry
from specbuild.runtime.engine_dir.geometry import Rope, TargetGeometry
from specbuild.runtime.errors import SpecbuildError


def refusal(path: Path, geometry: TargetGeometry, *, strict: bool = False) -> str:
    with pytest.raises(SpecbuildError) as caught:
        read_draft(path, geometry, strict=strict)
    return str(caught.value)


VARIANTS = {
    "plain": {},
    "layers.0": {"prefix": "layers.0"},
    "own embedding": {"own_embedding": True},
    "other width": {"own_embedding": True, "hidden": 32},
    "shared head": {"draft_vocab": None},
    "whole vocabulary": {"draft_vocab": 256},
    "one aux layer": {"aux_layers": (3,)},
    "five aux layers, one twice": {"aux_layers": (0, 1, 1, 2, 3)},
    "order as given": {"aux_layers": (3, 0, 2)},
    "default aux layers": {"name_aux_layers": False},
    "hidden only": {"input_width": "hidden"},
    "norm before fc": {"norm_before_fc": True},
    "fc norm": {"fc_norm": True},
    "norm before residual": {"norm_before_residual": True},
    "norm output": {"norm_output": True},
    "no t2d": {"t2d": False},
    "f32 in shards": {"dtype": "f32", "shards": 3},
    "f16": {"dtype": "f16"},
    "window": {"sliding_window": 16},
    "LlamaForCausalLM": {"architecture": "LlamaForCausalLM"},
    "Eagle3LlamaForCausalLM": {"architecture": "Eagle3LlamaForCausalLM"},
    "speculators": {"architecture": "Eagle3Speculator", "norm_output": True, "prefix": "layers.0"},
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_variants(
    tmp_path: Path, geometry: TargetGeometry, like_target: dict, variant: dict
) -> None:
    written = write_draft(tmp_path, **like_target | variant)
    checkpoint = read_draft(tmp_path, geometry, strict=True)
    written.pop("t2d", None)
    assert (
        set(checkpoint.tensors) == set(written) == set(draft_tensors(checkpoint.geometry, geometry))
    )
    assert all(torch.equal(checkpoint.tensors[n].load(), t) for n, t in written.items())
    vocab = variant.get("draft_vocab", 128)
    assert checkpoint.geometry == Eagle3Geometry(
        architecture=variant.get("architecture", "LlamaForCausalLMEagle3"),
        hidden=variant.get("hidden", 64),
        vocab=vocab or 256,
        q_heads=4,
        kv_heads=2,
        head_dim=32,
        inner=96,
        rms_eps=1e-5,
        rope=geometry.rope,
        aux_layers=variant.get("aux_layers", (0, 2, 3)),
        max_positions=512,
        d2t_form="offsets" if vocab else "identity",
        sliding_window=variant.get("sliding_window", 0),
        own_embedding=variant.get("own_embedding", False),
        own_head=vocab is not None,
        norm_before_fc=variant.get("norm_before_fc", False),
        input_width=variant.get("input_width", "embedding_and_hidden"),
        norm_before_residual=variant.get("norm_before_residual", False),
        norm_output=variant.get("norm_output", False),
        fc_norm=variant.get("fc_norm", False),
    )
    if variant.get("architecture") == "Eagle3Speculator":
        (warning,) = checkpoint.warnings
        assert "[1, 3, 4] was read as layer boundaries" in warning
    else:
        notes = [warning.split(" was ")[0] for warning in checkpoint.warnings]
        assert notes == (["draft config.json: norm_output"] if variant.get("norm_output") else [])


def test_norm_output_has_two_meanings(tmp_path: Path, geometry: TargetGeometry) -> None:
    write_draft(tmp_path, norm_output=True)
    read = partial(read_draft, tmp_path, replace(geometry, rope=Rope(10000.0)), strict=True)
    assert "build with --draft-norm-output head" in read().warnings[0]
    for meaning, normed in (("state", True), ("head", False)):
        message = read(norm_output=meaning)
        assert (message.geometry.norm_output, message.warnings) == (normed, ())


def test_layers_are_counted_by_their_tensors(tmp_path: Path, geometry: TargetGeometry) -> None:
    write_draft(tmp_path, layers=3, prefix="layers.0")
    geometry = replace(geometry, rope=Rope(10000.0))
    draft = read_draft(tmp_path, geometry, strict=True)
    assert (draft.geometry.layers, draft.warnings) == (3, ())
    edit_config(tmp_path, num_hidden_layers=36, layer_types=["full_attention"] * 3)
    (note,) = read_draft(tmp_path, geometry, strict=True).warnings
    assert note.endswith("is ignored, because it seems to be the target's; the draft has 3 layers")


def test_full_vocabulary_without_a_map(tmp_path: Path, geometry: TargetGeometry) -> None:
    write_draft(tmp_path, draft_vocab=256)
    edit_tensors(tmp_path, lambda t: [t.pop("d2t"), t.pop("t2d")])
    g = read_draft(tmp_path, geometry, strict=True).geometry
    assert (g.d2t_form, g.own_head, g.vocab) == ("identity", True, 256)


def test_the_size_of_the_draft_vocabulary_comes_from_the_head(
    draft: Path, geometry: TargetGeometry
) -> None:
    remove_fields(draft, "draft_vocab_size")
    assert read_draft(draft, geometry, strict=True).geometry.vocab == 128


def test_default_head_dim_and_kv_heads(tmp_path: Path, geometry: TargetGeometry) -> None:
    write_draft(tmp_path, head_dim=16, kv_heads=4)
    remove_fields(tmp_path, "head_dim", "num_key_value_heads")
    g = read_draft(tmp_path, geometry, strict=True).geometry
    assert (g.head_dim, g.kv_heads) == (16, 4)


@pytest.mark.parametrize(
    ("layers", "aux_layers"), [(24, (1, 11, 20)), (36, (1, 17, 32)), (6, (1, 2, 2)), (5, (0, 2, 4))]
)
def test_default_aux_layers(layers: int, aux_layers: tuple[int, ...]) -> None:
    assert default_aux_layers(layers) == aux_layers


@pytest.mark.parametrize("place", ["top", "eagle_config"])
def test_flags_may_be_in_either_section(
    tmp_path: Path, geometry: TargetGeometry, place: str
) -> None:
    write_draft(tmp_path, norm_before_fc=True)
    remove_fields(tmp_path, "norm_before_fc")
    flags = {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True}
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    if place == "top":
        edit_config(tmp_path, **flags)
    else:
        edit_config(tmp_path, eagle_config=layers | flags)
    g = read_draft(tmp_path, geometry, strict=True).geometry
    assert g.norm_before_fc and g.norm_before_residual and g.norm_output
    edit_config(tmp_path, norm_output=False, eagle_config=layers | flags)
    assert "norm_output: got True, expected the value outside" in refusal(tmp_path, geometry)


def test_norm_per_state_by_its_other_flag(tmp_path: Path, geometry: TargetGeometry) -> None:
    write_draft(tmp_path, fc_norm=True)
    remove_fields(tmp_path, "fc_norm")
    message = refusal(tmp_path, geometry)
    assert "left over: fc_norm.{0-2}.weight" in message
    assert "hint: there are norms before fc" in message
    edit_config(tmp_path, norm_before_fc=True)
    g = read_draft(tmp_path, geometry, strict=True).geometry
    assert (g.norm_before_fc, g.fc_norm) == (False, True)


def test_speculators_must_state_the_position_of_the_norm(
    tmp_path: Path, geometry: TargetGeometry
) -> None:
    write_draft(tmp_path, architecture="Eagle3Speculator")
    remove_fields(tmp_path, "norm_before_residual")
    assert "norm_before_residual is missing, and implementations" in refusal(tmp_path, geometry)


def test_aux_layers_outside_of_eagle_config(draft: Path, geometry: TargetGeometry) -> None:
    remove_fields(draft, "eagle_config")
    edit_config(draft, eagle_aux_hidden_state_layer_ids=[2, 3, 4])
    checkpoint = read_draft(draft, geometry, strict=True)
    assert checkpoint.geometry.aux_layers == (1, 2, 3)
    assert "outputs of layers [1, 2, 3] (0-based)" in checkpoint.warnings[0]
    for ids in ([0, 1, 2], [1, 2, 5]):
        edit_config(draft, eagle_aux_hidden_state_layer_ids=ids)
        assert "expected layer boundaries from 1 to 4" in refusal(draft, geometry)
    both = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    edit_config(draft, eagle_aux_hidden_state_layer_ids=[1, 2, 3], **both)
    assert read_draft(draft, geometry, strict=True).geometry.aux_layers == (0, 1, 2)
    edit_config(draft, eagle_aux_hidden_state_layer_ids=[3, 2, 1], **both)
    assert "the layers of the list outside" in refusal(draft, geometry)


def test_rejects_invalid_aux_layers(draft: Path, geometry: TargetGeometry) -> None:
    for ids, message in (
        ([0, 1, 4], "it reads layers [4], but the target has layers 0 to 3"),
        ([-1, 1, 2], "it reads layers [-1]"),
        ([0, 1], "got 2 aux layers, but fc.weight reads 3 states of 64"),
        (["a"], "expected whole numbers"),
    ):
        edit_config(draft, eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
        assert message in refusal(draft, geometry)


def test_rejects_a_missing_list_of_aux_layers(tmp_path: Path, geometry: TargetGeometry) -> None:
    write_draft(tmp_path, aux_layers=(0, 1, 2, 3), name_aux_layers=False)
    message = refusal(tmp_path, geometry)
    assert "fc.weight reads 4 hidden states, but eagle_config.eagle_aux_hidden" in message


def test_rejects_an_empty_list_of_aux_layers(draft: Path, geometry: TargetGeometry) -> None:
    edit_config(draft, eagle_config={"eagle_aux_hidden_state_layer_ids": []})
    assert read_draft(draft, geometry, strict=True).geometry.aux_layers == (0, 2, 3)


def test_a_draft_may_have_another_rope(tmp_path: Path, geometry: TargetGeometry) -> None:
    write_draft(tmp_path, rope_theta=None)
    checkpoint = read_draft(tmp_path, geometry, strict=True)
    assert checkpoint.geometry.rope == Rope(theta=10000.0)
    assert checkpoint.warnings == (
        "draft config.json: RoPE is theta 10000 without scaling, the target's theta 150000 with "
        "YaRN × 4 over 128; the draft uses its own",
    )


def test_map_instead_of_offsets(draft: Path, geometry: TargetGeometry) -> None:
    before = read_draft(draft, geometry, strict=True).tensors["d2t"].load()
    edit_tensors(draft, lambda t: t.update(d2t=t["d2t"] + torch.arange(128)))
    checkpoint = read_draft(draft, geometry, strict=True)
    assert checkpoint.geometry.d2t_form == "map"
    assert torch.equal(checkpoint.tensors["d2t"].load(), before)
    assert checkpoint.warnings == (
        "draft: d2t has target ids instead of EAGLE3's offsets; it was converted",
    )


def test_rejects_an_invalid_d2t(draft: Path, geometry: TargetGeometry) -> None:
    edit_tensors(draft, lambda t: t.update(d2t=t["d2t"] + 200))
    assert "d2t maps draft token" in refusal(draft, geometry)
    edit_tensors(draft, lambda t: t.update(d2t=torch.zeros(128, dtype=torch.int64)))
    assert "d2t and t2d disagree" in refusal(draft, geometry)
    edit_tensors(draft, lambda t: t.update(d2t=-torch.arange(128)))
    assert "maps several draft tokens to target token 0" in refusal(draft, geometry)


def test_windows(draft: Path, geometry: TargetGeometry) -> None:
    for changes, window in (
        ({"sliding_window": 9, "use_sliding_window": False}, 0),
        ({"sliding_window": 9, "layer_types": ["full_attention"]}, 0),
        ({"sliding_window": 9, "layer_types": ["sliding_attention"]}, 9),
    ):
        edit_config(draft, **{"use_sliding_window": None} | changes)
        assert read_draft(draft, geometry, strict=True).geometry.sliding_window == window


def test_rejects_a_vocabulary_larger_than_that_of_the_target(tmp_path: Path, geometry) -> None:
    write_draft(tmp_path, draft_vocab=257, target_vocab=257, config_changes={"vocab_size": 256})
    with pytest.raises(SpecbuildError, match="draft vocabulary is 257, but the target's is 256"):
        read_draft(tmp_path, geometry, strict=False)


def test_a_map_without_a_draft_head_is_unexpected(tmp_path: Path, geometry) -> None:
    write_draft(tmp_path, draft_vocab=None)
    edit_tensors(tmp_path, lambda t: t.update(d2t=torch.zeros(256, dtype=torch.int64)))
    with pytest.raises(SpecbuildError, match="left over: d2t"):
        read_draft(tmp_path, geometry, strict=False)


def test_both_sections_may_list_the_same_layers(draft: Path, geometry) -> None:
    edit_config(draft, eagle_aux_hidden_state_layer_ids=[0, 2, 3])
    checkpoint = read_draft(draft, geometry, strict=True)
    assert checkpoint.geometry.aux_layers == (0, 2, 3) and not checkpoint.warnings
