"""The format stores every family: its geometry, through JSON, and derived values."""

from __future__ import annotations

import json
import typing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_directory import write_manifest
from family_geometries import DEEPSEEK_V3, FAMILIES, GLM_47_FLASH
from toy_model import toy_manifest

from specbuild.plugins_cuda.moe.body import ACTIVATIONS
from specbuild.plugins_cuda.moe.op import route
from specbuild.runtime.engine_dir.feed_forward import (
    Activation,
    BothFeedForward,
    DenseFeedForward,
    FeedForward,
    MoeFeedForward,
)
from specbuild.runtime.engine_dir.files import read_manifest
from specbuild.runtime.engine_dir.geometry import TargetGeometry

# Parts of models with grouped-query attention that a Llama does not have.
FEATURES = {
    "Ministral-3-8B": ("query_growth",),
    "SmolLM3-3B": ("unrotated_layers",),
    "OLMo-3-7B": ("norm_places", "window_rope"),
    "Gemma-3-27B": (
        "attention_scale",
        "geglu",
        "linear_rope",
        "multipliers",
        "norm_places",
        "window_rope",
    ),
    "Granite-3.3-8B": ("attention_scale", "multipliers"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_manifest_of_every_family_is_read_as_it_was_written(tmp_path: Path, name: str) -> None:
    written = replace(toy_manifest(), target=FAMILIES[name][0])
    write_manifest(tmp_path, written)
    found = read_manifest(tmp_path)
    assert found.target == written.target
    assert found.drafters == written.drafters and found.draft is not None
    features = ("latents",) if written.target.mla is not None else FEATURES.get(name, ())
    assert found.features == features


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_that_follow_from_the_fields_are_the_published_ones(name: str) -> None:
    geometry, billions = FAMILIES[name]
    assert parameters(geometry) / 1e9 == pytest.approx(billions, abs=0.006 * max(1, billions / 20))


def test_layers_find_their_feed_forwards() -> None:
    kinds = [DEEPSEEK_V3.feed_forward(layer).kind for layer in range(5)]
    assert kinds == ["dense", "dense", "dense", "both", "both"]
    assert len(DEEPSEEK_V3.feed_forwards) == 2
    assert GLM_47_FLASH.moe is not None and GLM_47_FLASH.moe.scaling == 1.8


def test_the_gatings_of_the_format_equal_those_of_op_moe() -> None:
    gatings = typing.get_args(typing.get_type_hints(MoeFeedForward)["gating"])
    for gating in gatings:
        assert route(torch.zeros(1, 4), 2, gating).shape == (1, 4)
    kinds = [typing.get_type_hints(kind)["kind"] for kind in typing.get_args(Activation)]
    assert {typing.get_args(kind)[0] for kind in kinds} == set(ACTIVATIONS)


def test_a_written_union_names_its_member(tmp_path: Path) -> None:
    write_manifest(tmp_path, replace(toy_manifest(), target=DEEPSEEK_V3))
    written = json.loads((tmp_path / "manifest.json").read_bytes())
    first, second = written["target"]["feed_forwards"]
    assert (first["kind"], second["kind"]) == ("dense", "both")
    assert written["target"]["rope"]["scaling"]["kind"] == "yarn"
    assert written["drafters"][0]["kind"] == "eagle3"


def parameters(g: TargetGeometry) -> int:
    """Count parameters from the fields, without norms."""
    tables = (1 if g.tied_head else 2) * g.vocab * g.hidden
    return tables + sum(attention(g) + mlp(g, g.feed_forward(i)) for i in range(g.layers))


def attention(g: TargetGeometry) -> int:
    if g.mla is None:
        return g.hidden * g.head_dim * (2 * g.q_heads + 2 * g.kv_heads)
    m, query = g.mla, g.q_heads * (g.mla.nope_dim + g.mla.rope_dim)
    queries = g.hidden * query
    if m.q_lora_rank is not None:
        queries = m.q_lora_rank * (g.hidden + query)
    expanded = m.kv_lora_rank * g.q_heads * (m.nope_dim + m.v_dim)
    return queries + g.hidden * m.entry_width + expanded + g.hidden * g.q_heads * m.v_dim


def mlp(g: TargetGeometry, feed_forward: FeedForward) -> int:
    if isinstance(feed_forward, DenseFeedForward):
        return 3 * g.hidden * feed_forward.inner
    if isinstance(feed_forward, BothFeedForward):
        return mlp(g, feed_forward.dense) + mlp(g, feed_forward.moe)
    return feed_forward.experts * (g.hidden + 3 * g.hidden * feed_forward.inner)
