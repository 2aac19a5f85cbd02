"""A GGUF model equals the same model from safetensors: geometry, tensors and text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_checkpoints import KINDS, SIZES, YARN, write_deepseek
from gguf_files import Stored, write_gguf
from gguf_keys import APART, DEEPSEEK_KEYS, TEMPLATE, TOGETHER, write_gpt_oss
from gguf_models import deepseek_twin

from specbuild.builder.checkpoint.target_parts import TargetCheckpoint
from specbuild.builder.families.checkpoints import read_target
from specbuild.builder.families.deepseek import gguf
from specbuild.runtime.errors import SpecbuildError


def assert_same(one: TargetCheckpoint, other: TargetCheckpoint) -> None:
    assert one.geometry == other.geometry
    assert set(one.tensors) == set(other.tensors)
    for name, source in one.tensors.items():
        twin = other.tensors[name]
        assert (source.shape, source.dtype) == (twin.shape, twin.dtype), name
        result, expected = source.load(), twin.load()
        assert result.dtype == expected.dtype
        assert result.shape == source.shape
        assert torch.equal(result, expected), name


@pytest.mark.parametrize("experts", ["mxfp4", "bf16"])
def test_gpt_oss(tmp_path: Path, experts: str) -> None:
    model, keys, tensors = write_gpt_oss(tmp_path, experts_format=experts)
    file = write_gguf(tmp_path / "model.gguf", "gpt-oss", keys, tensors)
    result = read_target(file, strict=True)
    assert_same(result, read_target(model, strict=True))
    texts = {text.name: text.read_bytes() for text in result.text_files}
    assert texts["chat_template.jinja"].decode() == TEMPLATE
    assert json.loads(texts["tokenizer_config.json"])["eos_token"] == "<|return|>"
    assert all(text.parent == file for text in result.text_files)
    kinds = {tensor.dtype for tensor in result.tensors.values()}
    assert ("U8" in kinds) == (experts == "mxfp4")


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("q_lora_rank", [24, None])
def test_deepseek(tmp_path: Path, apart: bool, q_lora_rank: int | None) -> None:
    model = tmp_path / "model"
    sizes: dict[str, Any] = {"rope_parameters": YARN | {"mscale": 0.8}, "q_lora_rank": q_lora_rank}
    write_deepseek(model, **sizes)
    keys = DEEPSEEK_KEYS | (APART if apart else TOGETHER)
    if q_lora_rank is None:
        del keys[".attention.q_lora_rank"]
    tensors = deepseek_twin(model, SIZES, apart=apart)
    file = write_gguf(tmp_path / "model.gguf", "deepseek2", keys, tensors, tensors_a_file=9)
    result, expected = read_target(file, strict=True), read_target(model, strict=True)
    assert result.text_files == ()
    assert result.geometry.eos_token_ids == ()
    assert result.warnings == (
        "target: no EOS token is defined; output ends only at its maximum length",
    )
    geometry = replace(expected.geometry, eos_token_ids=())
    assert_same(result, replace(expected, geometry=geometry))


_V3 = {".expert_count": 12, ".expert_used_count": 4, ".expert_shared_count": 1}
_NO_GROUPS = {".expert_group_count": None, ".expert_group_used_count": None}
_NO_SCALING = {f".rope.scaling.{name}": None for name in
               ("type", "factor", "original_context_length", "yarn_log_multiplier")}  # fmt: skip
# For each kind, the keys that differ.
OTHERS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        **_NO_GROUPS, ".attention.q_lora_rank": None, ".expert_weights_norm": None,
        ".expert_weights_scale": None, ".expert_gating_func": None,
        ".rope.scaling.yarn_log_multiplier": 0.0707,
    },
    "glm4_moe_lite": {
        **_V3, **_NO_GROUPS, **_NO_SCALING, ".expert_weights_scale": 1.8,
        ".expert_gating_func": None, ".attention.value_length_mla": 28,
    },
    "youtu": {
        **_NO_GROUPS, ".leading_dense_block_count": 2, ".expert_weights_scale": None,
        ".expert_weights_norm": None, ".expert_count": None, ".expert_used_count": None,
        ".expert_shared_count": None, ".expert_feed_forward_length": None,
        ".expert_gating_func": None, ".rope.scaling.factor": 1.0,
        ".rope.scaling.original_context_length": None, ".rope.scaling.yarn_log_multiplier": 0.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_variants_of_deepseek(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    if kind == "glm4_moe_lite":  # The release is identified by its size.
        monkeypatch.setattr(gguf, "_GLM_LAYERS", (2,))
        monkeypatch.setattr(gguf, "_GLM_VOCAB", 32)
    model = tmp_path / "model"
    write_deepseek(model, kind=kind)
    sizes = SIZES | KINDS[kind][1]
    keys = DEEPSEEK_KEYS | APART | OTHERS[kind]
    keys = {name: value for name, value in keys.items() if value is not None}
    tensors = deepseek_twin(model, sizes, apart=kind != "deepseek_v2")
    if kind == "deepseek_v2":  # an older file
        keys = {name: value for name, value in keys.items() if not name.endswith("_mla")} | TOGETHER
    file = write_gguf(tmp_path / "model.gguf", "deepseek2", keys, tensors)
    result, expected = read_target(file, strict=True), read_target(model, strict=True)
    assert result.geometry.model_type == kind
    assert result.geometry.tied_head == (kind == "youtu")
    geometry = replace(expected.geometry, eos_token_ids=())
    assert_same(result, replace(expected, geometry=geometry))


def test_mtp_layers_are_omitted(tmp_path: Path) -> None:
    """A GGUF file counts MTP layers among its layers."""
    model = tmp_path / "model"
    write_deepseek(model)
    tensors = deepseek_twin(model, SIZES, apart=True)
    names = [name for name in tensors if name.startswith("blk.1.")]
    more = {name.replace("blk.1.", "blk.2."): tensors[name] for name in names}
    more["blk.2.nextn.eh_proj.weight"] = tensors["blk.1.attn_q_a.weight"]
    keys = DEEPSEEK_KEYS | APART | {".block_count": 3, ".nextn_predict_layers": 1}
    file = write_gguf(tmp_path / "model.gguf", "deepseek2", keys, tensors | more)
    result = read_target(file, strict=True)
    assert result.geometry.layers == 2
    assert any("layer 2 predicts further tokens" in warning for warning in result.warnings)
    assert set(result.tensors) == set(read_target(model, strict=True).tensors)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"general.architecture": "gpt2"}, "general.architecture 'gpt2' is not read"),
    "adapter": ({"general.type": "adapter"}, "of general.type 'adapter', not a whole model"),
    "layers": ({".block_count": 2**32 - 1}, "block_count: got 4294967295, .* at most 4096"),
    "experts": ({".expert_count": 1 << 31}, "expert_count: got 2147483648, .* at most 4096"),
    "no layers": ({".block_count": None}, "the field block_count is missing"),
    "rotated": ({".rope.dimension_count": 8}, "rope.dimension_count: got 8, expected 32"),
    "values": ({".attention.value_length": 8}, "attention.value_length: got 8, expected 32"),
    "by layer": ({".attention.head_count_kv": [2, 1]}, "head_count_kv: got .2, 1."),
    "rope": ({".rope.scaling.type": "ntk"}, "rope_type 'ntk' is not implemented"),
    "unknown": ({".logit_scale": 0.5}, "unknown fields gpt-oss.logit_scale"),
    "words": ({"tokenizer.ggml.pre": "chameleon"}, "tokenizer.ggml.pre 'chameleon' is not read"),
    "vocabulary": ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model 'bert' is not read"),
    "too many tokens": ({"tokenizer.ggml.tokens": ["x"] * 400}, "names 400 tokens, .* has 320"),
    "twice": ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "the token 'a' stands twice"),
}  # fmt: skip


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Stored]]:
    _, keys, tensors = write_gpt_oss(tmp_path_factory.mktemp("gguf"))
    return keys, tensors


@pytest.mark.parametrize("name", REFUSED)
def test_metadata_is_validated(
    tmp_path: Path, gpt_oss: tuple[dict[str, Any], dict[str, Stored]], name: str
) -> None:
    changes, message = REFUSED[name]
    keys = {key: value for key, value in (gpt_oss[0] | changes).items() if value is not None}
    architecture = keys.pop("general.architecture", "gpt-oss")
    file = write_gguf(tmp_path / "model.gguf", architecture, keys, gpt_oss[1])
    with pytest.raises(SpecbuildError, match=message):
        read_target(file, strict=True)


def test_warns_of_unknown_keys(
    tmp_path: Path, gpt_oss: tuple[dict[str, Any], dict[str, Stored]]
) -> None:
    keys = gpt_oss[0] | {".logit_scale": 0.5, "general.name": "x", "quantize.n": 3}
    # Equal values of all layers are stored as one value.
    keys[".attention.head_count_kv"] = [2, 2]
    file = write_gguf(tmp_path / "model.gguf", "gpt-oss", keys, gpt_oss[1])
    (warning,) = read_target(file, strict=False).warnings
    assert warning == "target GGUF: the field gpt-oss.logit_scale (0.5) is unknown and was ignored"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blk.0.attn_q.weight": None}, r"missing: model.layers.0.self_attn.q_proj.weight"),
        ({"blk.0.strange.weight": "blk.0.attn_q.weight"}, r"left over: blk.0.strange.weight"),
        ({"token_embd.weight": None}, "has no tensor token_embd.weight"),
        ({"blk.1.ffn_up_exps.weight": "blk.0.attn_q.weight"}, r"left over: blk.1.ffn_up_exps"),
    ],
)
def test_tensors_are_audited(
    tmp_path: Path,
    gpt_oss: tuple[dict[str, Any], dict[str, Stored]],
    change: dict[str, str | None],
    message: str,
) -> None:
    tensors = dict(gpt_oss[1])
    for name, source in change.items():
        tensors[name] = gpt_oss[1][source or name]
        if source is None:
            del tensors[name]
    file = write_gguf(tmp_path / "model.gguf", "gpt-oss", gpt_oss[0], tensors)
    with pytest.raises(SpecbuildError, match=message):
        read_target(file, strict=True)
