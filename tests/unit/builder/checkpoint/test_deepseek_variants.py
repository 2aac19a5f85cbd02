"""Properties of single model types with DeepSeek's attention: routing, and dense layers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from checkpoint_files import edit_config, remove_fields
from deepseek_checkpoints import GROUPS_BY_BEST, KINDS, write_deepseek

from specbuild.builder.backends.cuda.check import require_cuda_support
from specbuild.builder.backends.tensorrt.standard.check import require_standard_support
from specbuild.builder.families.checkpoints import read_target
from specbuild.builder.options import BuildOptions
from specbuild.runtime.engine_dir.feed_forward import MoeFeedForward, routed_part
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.errors import SpecbuildError


def geometry(path: Path) -> TargetGeometry:
    return read_target(path, strict=True).geometry


def refusal(path: Path) -> str:
    with pytest.raises(SpecbuildError) as error:
        read_target(path, strict=False)
    return str(error.value)


def routed_layers(g: TargetGeometry) -> list[bool]:
    return [routed_part(g.feed_forward(layer)) is not None for layer in range(g.layers)]


def moe(path: Path) -> MoeFeedForward:
    result = geometry(path).moe
    assert result is not None
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_each_model_type_is_named_in_errors(kind: str, tmp_path: Path) -> None:
    """These small widths are not supported by the kernels."""
    write_deepseek(tmp_path, kind=kind)
    checkpoint = read_target(tmp_path, strict=True)
    assert checkpoint.warnings == ()
    g = checkpoint.geometry
    assert g.model_type == kind and g.norm.eps == 0.02
    assert g.mla is not None and g.mla.norm.eps == 1e-6
    with pytest.raises(SpecbuildError, match=r"CUDA kernels need a multiple of \d+; build with"):
        require_cuda_support(g, None)
    with pytest.raises(SpecbuildError, match=f"a {kind}, whose attention .MLA. TensorRT"):
        require_standard_support(g, None, BuildOptions(model=tmp_path, output=tmp_path / "engine"))


def test_dense_layers_of_glm_by_a_number_or_a_list(tmp_path: Path) -> None:
    write_deepseek(tmp_path, kind="glm4_moe_lite", num_hidden_layers=3)
    by_list = geometry(tmp_path)
    assert routed_layers(by_list) == [False, True, True]
    edit_config(
        tmp_path, first_k_dense_replace=1, partial_rotary_factor=1, rope_parameters=None,
        rope_scaling=None, rope_theta=10000.0, num_nextn_predict_layers=1, topk_method="noaux_tc",
    )  # fmt: skip
    assert geometry(tmp_path) == by_list  # as saved and as released
    remove_fields(tmp_path, "mlp_layer_types")
    assert geometry(tmp_path) == by_list
    remove_fields(tmp_path, "first_k_dense_replace")
    assert geometry(tmp_path) == by_list
    edit_config(tmp_path, mlp_layer_types=["dense", "sparse", "sparse"], first_k_dense_replace=2)
    assert "first_k_dense_replace 2 and mlp_layer_types differ" in refusal(tmp_path)
    edit_config(tmp_path, mlp_layer_types=["dense", "sparse"])
    assert 'expected "dense" or "sparse" for each of 3 layers' in refusal(tmp_path)
    edit_config(tmp_path, mlp_layer_types=None, partial_rotary_factor=0.5)
    assert "partial_rotary_factor 0.5 is not implemented" in refusal(tmp_path)


def test_the_default_number_of_dense_layers(tmp_path: Path) -> None:
    """As in transformers: the default of DeepSeek-V3 is three."""
    write_deepseek(tmp_path, num_hidden_layers=4, first_k_dense_replace=3)
    remove_fields(tmp_path, "first_k_dense_replace")
    assert routed_layers(geometry(tmp_path)) == [False, False, False, True]


def test_v2_routes_by_a_softmax_over_all_experts(tmp_path: Path) -> None:
    write_deepseek(tmp_path, kind="deepseek_v2")
    edit_config(tmp_path, n_group=1, topk_group=1, scoring_func="softmax")
    result = moe(tmp_path)
    assert (result.gating, result.choice_bias, result.scaling) == ("softmax_topk", False, 1.0)
    assert (result.groups, result.groups_chosen) == (1, 1)
    mla = geometry(tmp_path).mla
    assert mla is not None and mla.q_lora_rank is None
    assert mla.scale == pytest.approx(40**-0.5 * (0.1 * 0.707 * math.log(4) + 1) ** 2)
    edit_config(tmp_path, **GROUPS_BY_BEST | {"q_lora_rank": None})
    result = moe(tmp_path)
    assert (result.groups, result.groups_chosen, result.group_score) == (4, 2, "max")
    assert result.scaling == 4.0
    # with one expert a group, the group's best expert exists
    edit_config(tmp_path, n_group=8, topk_group=3)
    assert moe(tmp_path).groups == 8
    edit_config(tmp_path, topk_method="greedy")
    assert moe(tmp_path).groups == 1


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob True is not implemented"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not implemented"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not implemented"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias True is not implemented"),
        ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq 2 is not implemented"),
        ("youtu", {"tie_word_embeddings": False}, "missing: lm_head.weight"),
        ("youtu", {"num_hidden_layers": 3}, "the shards hold 2 layers, config.json says 3"),
        ("kimi_k2", {"topk_method": "greedy"}, "topk_method 'greedy' is not implemented"),
    ],
)
def test_rejects_invalid_references(kind: str, changes: dict, message: str, tmp_path: Path) -> None:
    write_deepseek(tmp_path, kind=kind)
    edit_config(tmp_path, **changes)
    assert message in refusal(tmp_path)


def test_rope_of_youtu_with_factor_1_is_unscaled(tmp_path: Path) -> None:
    write_deepseek(tmp_path, kind="youtu")
    g = geometry(tmp_path)
    assert g.tied_head and g.moe is None
    assert g.mla is not None and g.mla.scale == pytest.approx(40**-0.5)
    assert g.rope.attention_factor == 1.0
