"""Rules of a manifest that its types cannot express. Every violation gives one sentence."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engine_directory import write_manifest
from family_geometries import FAMILIES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy_model import toy_manifest

from specbuild.runtime.engine_dir.features import stored_json
from specbuild.runtime.engine_dir.files import read_manifest
from specbuild.runtime.engine_dir.geometry import IndexerGeometry
from specbuild.runtime.engine_dir.manifest import Dsa, SpecPv
from specbuild.runtime.errors import EngineFileError


@cache
def described(family: str) -> dict[str, Any]:
    """Return a manifest with every optional part of the family's engines."""
    target = replace(
        FAMILIES[family][0], indexer=IndexerGeometry((1,), 1, 32, False), eos_token_ids=(1, 2)
    )
    manifest = replace(
        toy_manifest(),
        target=target,
        specpv=SpecPv(16, 2, 256, 8, 64, 4096, 32),
        dsa=Dsa(2048, 8192, 4, 64, 0.75, 64),
        replaced={"k_proj": "c_proj"},
    )
    written: dict[str, Any] = json.loads(json.dumps(stored_json(manifest)))
    return written


Change = Callable[[dict[str, Any]], object]


def of_target(**values: object) -> Change:
    return lambda d: d["target"].update(values)


def of_moe(**values: object) -> Change:
    return lambda d: d["target"]["feed_forwards"][1]["moe"].update(values)


def of_drafter(**values: object) -> Change:
    return lambda d: d["drafters"][0].update(values)


def second_drafter(d: dict[str, Any]) -> None:
    d["drafters"].append(copy.deepcopy(d["drafters"][0]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (of_target(), ""),
        (of_target(layers=0), "target.layers is 0, must be 1 or above"),
        (of_target(head_dim=2**31), "target.head_dim is"),
        (of_target(sliding_window=-1), "target.sliding_window is -1"),
        (of_target(layer_types=["full_attention"]), "61 layers, but 1 layer_types"),
        (of_target(eos_token_ids=[129280]), "expected ids below the vocabulary's 129280"),
        (of_target(latent_dims=[1]), "expected none or 61"),
        (of_target(latent_dims=[-1] * 61), "expected none or 61 of 0 or above"),
        (of_target(norm={"eps": -1, "rounding": "before_weight"}), "target.norm.eps is -1"),
        (of_target(norm={"eps": 0, "rounding": "never"}), "expected one of 'before_weight'"),
        (lambda d: d["target"]["mla"]["norm"].update(eps=-1.0), "target.mla.norm.eps is -1"),
        (lambda d: d["target"]["mla"].update(kv_lora_rank=0), "target.mla.kv_lora_rank is 0"),
        (lambda d: d["target"]["indexer"].update(layers=[61]), "indexer.layers are"),
        (lambda d: d["target"]["rope"].update(theta=0.0), "target.rope.theta is 0"),
        (lambda d: d["target"]["rope"].update(width=3), "target.rope.width is 3, must be even"),
        (lambda d: d["target"]["rope"]["scaling"].update(factor=0), "rope.scaling.factor is 0"),
        (of_target(layer_feed_forwards=[0]), "61 layers, but 1 feed-forwards"),
        (of_target(layer_feed_forwards=[0] * 61), r"name \[0\], but feed_forwards are 2"),
        (of_target(layer_feed_forwards=[0, 2] + [1] * 59), r"name \[0, 1, 2\]"),
        (of_target(layer_feed_forwards=[0, -1] + [1] * 59), r"name \[-1, 0, 1\]"),
        (
            lambda d: d["target"]["feed_forwards"].__setitem__(1, d["target"]["feed_forwards"][0]),
            "two are equal",
        ),
        (of_moe(inner=0), r"feed_forwards\[1\].moe.inner is 0"),
        (of_moe(experts_per_token=129), "129 experts per token, but only 128 to choose from"),
        (of_moe(groups=7), "4 of 7 groups of 256 experts"),
        (of_moe(groups_chosen=9), "9 of 8 groups of 256 experts"),
        (of_moe(groups=256, groups_chosen=8), "one expert a group has no sum of two"),
        (of_moe(gating="argmax"), "expected one of 'softmax_selected'"),
        (
            of_drafter(cache_group="dflash"),
            r"drafters\[0\]\.cache_group: got 'dflash', expected",
        ),
        (of_drafter(cache_group="other"), "got 'other', expected one of 'draft', 'eagle3'"),
        (of_drafter(roles=["draft"]), r"drafters\[0\]: roles are"),
        (lambda d: d["roles"].pop("expand"), r"drafters\[0\]: role 'expand' is not listed"),
        (lambda d: d["drafters"][0]["geometry"].update(aux_layers=[61]), r"aux_layers \[61\]"),
        (lambda d: d["drafters"][0]["geometry"].update(dtype="int3"), "got 'int3', expected one"),
        (second_drafter, "drafters 0 and 1 share role 'draft_fuse'"),
        (lambda d: d["roles"].pop("accept"), r"roles: missing \['accept'\]"),
        (lambda d: d.update(features=["dsa", "latents"]), "feature 'specpv' is used, but not"),
    ],
)
def test_constraints_beyond_types(tmp_path: Path, change: Change, message: str) -> None:
    data = copy.deepcopy(described("DeepSeek-V3"))
    change(data)
    write_manifest(tmp_path, data)
    if not message:
        read_manifest(tmp_path)
        return
    with pytest.raises(EngineFileError, match=message):
        read_manifest(tmp_path)


numbers = st.sampled_from([-1, 0, 1, 2, 7, 2**31 - 1, 2**31, 2**80, 0.5, -0.0, 1e308])
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=3) | st.sampled_from(["moe", "yarn"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["kind", "inner", "moe", "x"]), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_a_changed_manifest_is_rejected_or_read_as_written(
    tmp_path: Path, data: st.DataObject
) -> None:
    """One to three places of a manifest are replaced, removed or duplicated."""
    written = copy.deepcopy(described(data.draw(st.sampled_from(sorted(FAMILIES)))))
    for _ in range(data.draw(st.integers(1, 3))):
        change_one(written, data)
    write_manifest(tmp_path, written)
    try:
        found = read_manifest(tmp_path)
    except EngineFileError as error:
        assert str(error).strip() and "\n" not in str(error)
        return
    again = tmp_path / "again"
    again.mkdir(exist_ok=True)
    write_manifest(again, found)
    assert replace(read_manifest(again), features=found.features) == found


def change_one(written: dict[str, Any], data: st.DataObject) -> None:
    parts = ["target", "drafters", "features", "cache_groups", "limits", "roles", "dsa", "specpv"]
    holder: Any = written
    key: Any = data.draw(st.sampled_from([part for part in parts if part in written]))
    while isinstance(holder[key], (dict, list)) and holder[key] and data.draw(st.integers(0, 4)):
        holder = holder[key]
        key = data.draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else
                                        list(range(len(holder)))))  # fmt: skip
    kind = data.draw(st.sampled_from(["replaced", "gone", "twice"]))
    if kind == "gone":
        del holder[key]
    elif kind == "twice" and isinstance(holder, list):
        holder.append(holder[key])
    else:
        holder[key] = data.draw(values)
