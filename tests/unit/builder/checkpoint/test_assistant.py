"""Assistants of Gemma 4: what their reader takes, and every way in which they are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import edit_config, edit_tensors
from drafter_references import fields_of
from gemma4_assistants import TYPES, write_assistant
from llama_checkpoints import write_llama
from safetensors.torch import load_file

from specbuild.builder.backends.cuda.check import require_cuda_support
from specbuild.builder.families.checkpoints import read_draft, read_target
from specbuild.runtime.engine_dir.drafters.gemma4_assistant import AssistantGeometry
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.errors import SpecbuildError


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetGeometry:
    """Layers with a window of 12 and without, in turn; keys are values in the latter."""
    path = tmp_path_factory.mktemp("model")
    write_llama(path, "gemma4_text")
    return read_target(path, strict=True).geometry


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """An assistant for it."""
    write_assistant(tmp_path)
    return tmp_path


def test_what_is_read(draft: Path, target: TargetGeometry) -> None:
    read = read_draft(draft, target, strict=False)
    g = read.geometry
    assert isinstance(g, AssistantGeometry)
    assert (g.hidden, g.decoder.hidden, g.layers, g.cached_layers) == (64, 32, len(TYPES), 0)
    assert (g.decoder.layer_types, g.decoder.sliding_window) == (TYPES, 12)
    assert (g.aux_layers, g.target_layers(target)) == ((3,), (2, 3))
    halves = ("embedding_projection.weight", "state_projection.weight")
    names = {*halves, "post_projection.weight", "lm_head.weight", "norm.weight"}
    assert names < set(read.tensors)
    stored = load_file(draft / "model.safetensors")["pre_projection.weight"]
    assert torch.equal(torch.cat([read.tensors[n].load() for n in halves], dim=1), stored)
    assert not any("k_proj" in name or "embed_tokens" in name for name in read.tensors)


def test_keys_and_values_of_layers_are_ignored(draft: Path, target: TargetGeometry) -> None:
    """Some files have them, although every layer reads the target's."""
    name = "model.layers.0.self_attn.k_proj.weight"
    edit_tensors(draft, lambda tensors: tensors.update({name: torch.ones(32, 32)}))
    assert not any("k_proj" in n for n in read_draft(draft, target, strict=False).tensors)


def test_clusters_of_tokens(tmp_path: Path, target: TargetGeometry) -> None:
    write_assistant(tmp_path, clustered=True)
    g = read_draft(tmp_path, target, strict=False).geometry
    assert isinstance(g, AssistantGeometry) and (g.clusters, g.read_clusters) == (8, 3)
    name = "masked_embedding.token_ordering"
    edit_tensors(tmp_path, lambda tensors: tensors[name].__setitem__(0, 32))
    with pytest.raises(SpecbuildError, match="does not list each of the 32 tokens once"):
        read_draft(tmp_path, target, strict=False)


def _text(draft: Path, **changes: Any) -> None:
    """Change fields of the config's section for the layers."""
    edit_config(draft, text_config=fields_of(draft)["text_config"] | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 33}, "its vocab_size is 33, the target's 32"),
        ({"sliding_window": 13}, "its sliding_window is 13, but the target only keeps 12 tokens"),
        ({"head_dim": 8}, "its sliding_attention reads 2 KV heads of 8, the target's has 2 of 16"),
        ({"num_key_value_heads": 4}, "reads 4 KV heads of 16, the target's has 2 of 16"),
        ({"rope_parameters": None}, None),
        (
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 32},
            "expected 0 in an assistant",
        ),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
             "moe_intermediate_size": 8},
            "expected false in an assistant",
        ),
        ({"model_type": None}, "model_type: got None, expected gemma4_text"),
    ],
)  # fmt: skip
def test_layers_that_do_not_fit(
    draft: Path, target: TargetGeometry, changes: dict[str, Any], message: str | None
) -> None:
    _text(draft, **changes)
    if message is None:  # the defaults are those of the target
        assert read_draft(draft, target, strict=False).geometry.rope == target.rope
        return
    with pytest.raises(SpecbuildError, match=message):
        read_draft(draft, target, strict=False)


def test_another_rope_is_refused(draft: Path, target: TargetGeometry) -> None:
    """The target has rotated the keys already."""
    ropes = fields_of(draft)["text_config"]["rope_parameters"]
    ropes["full_attention"]["rope_theta"] = 500.0
    _text(draft, rope_parameters=ropes)
    with pytest.raises(SpecbuildError, match="its full_attention has another RoPE"):
        read_draft(draft, target, strict=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone_hidden_size": 128}, "its backbone_hidden_size is 128, the target's hidden"),
        (
            {"use_ordered_embeddings": True, "num_centroids": 5},
            "5 clusters, of which it reads 32, do not divide its vocabulary of 32",
        ),
        (
            {"use_ordered_embeddings": True, "num_centroids": 8, "centroid_intermediate_top_k": 2},
            r"missing: masked_embedding.centroids.weight, shape \[8, 32\]",
        ),
        ({"tie_word_embeddings": False}, "tie_word_embeddings False is not implemented"),
        ({"temperature_head": 1}, "unknown fields temperature_head"),
    ],
)
def test_refused_fields(
    draft: Path, target: TargetGeometry, changes: dict[str, Any], message: str
) -> None:
    edit_config(draft, **changes)
    with pytest.raises(SpecbuildError, match=message):
        read_draft(draft, target, strict="temperature_head" in changes)


def test_a_target_without_windows(draft: Path, tmp_path: Path) -> None:
    write_llama(tmp_path / "llama", "llama")
    llama = read_target(tmp_path / "llama", strict=False).geometry
    with pytest.raises(SpecbuildError, match="layers of type sliding_attention, the target has no"):
        read_draft(draft, llama, strict=False)


def test_missing_tensors_and_wrong_options(draft: Path, target: TargetGeometry) -> None:
    with pytest.raises(SpecbuildError, match="needs an EAGLE3 draft, but this is an assistant"):
        read_draft(draft, target, strict=False, norm_output="head")
    edit_tensors(draft, lambda tensors: tensors.pop("post_projection.weight"))
    with pytest.raises(SpecbuildError, match=r"missing: post_projection.weight, shape \[64, 32\]"):
        read_draft(draft, target, strict=False)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"intermediate_size": 96}, None),
        ({"intermediate_size": 80}, "the draft's intermediate_size is 80, but CUDA kernels need"),
        ({"intermediate_size": 96, "clustered": True}, None),
    ],
)
def test_what_cuda_supports(
    tmp_path: Path, target: TargetGeometry, sizes: dict[str, Any], message: str | None
) -> None:
    write_assistant(tmp_path, **sizes)
    geometry = read_draft(tmp_path, target, strict=True).geometry
    if message is None:
        require_cuda_support(target, geometry)
        return
    with pytest.raises(SpecbuildError, match=message):
        require_cuda_support(target, geometry)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"clusters": 8192, "read_clusters": 32},
            "head has 32 of 8192 clusters and rows of 32",
        ),
        ({"clusters": 2048, "read_clusters": 65}, "CUDA kernels support up to 64 of 4096"),
    ],
)
def test_clusters_that_cuda_does_not_support(
    tmp_path: Path, target: TargetGeometry, sizes: dict[str, int], message: str
) -> None:
    write_assistant(tmp_path, clustered=True, intermediate_size=96)
    geometry = read_draft(tmp_path, target, strict=True).geometry
    assert isinstance(geometry, AssistantGeometry)
    with pytest.raises(SpecbuildError, match=message):
        require_cuda_support(target, replace(geometry, **sizes))
